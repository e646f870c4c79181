"""What cannot be trained, averaged and saved together, told before anything is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerostart.training.config.train import TrainConfig


def check_trained(config: TrainConfig) -> None:
    """Raise ValueError for sections that contradict each other in what is trained, averaged and saved."""
    output, lora = config.output, config.lora
    _check_best(config)
    _check_held_out(config)
    if lora is not None and config.train.trainable:
        raise ValueError("train.trainable and lora both say what is trained; leave one of them out")
    if lora is not None and config.engine.expert_parallel > 1:
        raise ValueError(
            f"engine.expert_parallel {config.engine.expert_parallel} is not available with lora: adapters of "
            "experts that ranks share are not; leave one of them out"
        )
    if output.merge and lora is None:
        raise ValueError("output.merge merges a LoRA, and there is no section lora; leave it out")
    if output.merge and config.ema is not None:
        raise ValueError("output.merge with ema is not available: averaged adapters are saved as adapters")
    if output.format == "peft" and lora is None:
        raise ValueError("output.format peft is for adapters, and there is no section lora; leave it out")
    if output.merge and (output.format is not None or output.trainable_only):
        raise ValueError("output.merge saves a whole model; leave output.format and trainable_only out")
    part = lora is not None or output.trainable_only or output.format == "diffsynth"
    if output.pipeline and not output.merge and part:
        raise ValueError("output.pipeline wants a whole model; set output.merge, or leave it out")
    if output.remove_prefix and (output.merge or not part):
        raise ValueError(
            "output.remove_prefix is for files of what was trained: set output.trainable_only or "
            "output.format diffsynth"
        )


def _check_best(config: TrainConfig) -> None:
    """Raise ValueError where checkpoints are to be compared by a loss that is not measured at each."""
    best, saved, measured = config.checkpoint.best, config.checkpoint.every, config.train.evaluate_every
    held_out = getattr(config.data, "held_out", 0.0) or getattr(config.task, "held_out", 0.0)
    if best and not (saved and measured and held_out and saved % measured == 0):
        raise ValueError(
            "checkpoint.best compares held-out losses: hold examples out (held_out of data or task), and "
            "make checkpoint.every a multiple of train.evaluate_every"
        )


def _check_held_out(config: TrainConfig) -> None:
    """Raise ValueError for a held-out loss that is asked for where nothing is held out.

    A task of somebody else that has no such key may hold examples out by itself.
    """
    asked = {"train.evaluate_every": config.train.evaluate_every}
    asked["ema.evaluate"] = config.ema is not None and config.ema.evaluate
    sections = [name for name in ("data", "task") if hasattr(getattr(config, name), "held_out")]
    if sections and not any(getattr(config, name).held_out for name in sections):
        for key in (key for key, value in asked.items() if value):
            raise ValueError(
                f"{key} needs examples that are held out, and none are: set {sections[0]}.held_out, or leave "
                "it out"
            )
