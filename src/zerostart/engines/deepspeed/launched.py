"""DeepSpeed as ``accelerate launch`` sets it up, for a training run: its file, and what it says besides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zerostart.engines.deepspeed.reading import section_of
from zerostart.engines.training import LauncherSetup
from zerostart.errors import ConfigError
from zerostart.upstream.accelerate.launched import launched_deepspeed

#: Keys of DeepSpeed's configuration that other sections of a training configuration decide.
_DECIDED = {
    "gradient_accumulation_steps": "train.accumulation",
    "gradient_clipping": "train.max_grad_norm",
    "train_micro_batch_size_per_gpu": "train.batch_size",
    "zero_optimization.stage": "engine.zero_stage",
}
#: What accelerate leaves to itself, and a run does by itself.
_IGNORED = ("steps_per_print", "zero_allow_untested_optimizer")


def launched() -> LauncherSetup:
    """The launcher's configuration; raises ConfigError for one that cannot be read.

    ``zero3_init_flag`` and ``zero3_save_16bit_model`` are about loading and saving, and say nothing here.
    """
    path, said = launched_deepspeed()
    config = {} if path is None else _read(path)
    for key, word in said.items():
        _put(config, key, _value(word))
    for key in _IGNORED:
        config.pop(key, None)
    agreed: dict[str, tuple[str, Any]] = {}
    for key, name in _DECIDED.items():
        value = _taken(config, key)
        if value not in (None, "auto"):
            agreed[name] = (key, value)
    for precision in ("bf16", "fp16"):
        if section_of(config, precision, "the launcher's DeepSpeed configuration").get("enabled") is True:
            agreed["train.mixed_precision"] = (f"{precision}.enabled", precision)
    return LauncherSetup(config, agreed)


def _read(path: str) -> dict[str, Any]:
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"deepspeed_config_file {path} of the launcher's configuration is not a readable JSON file: "
            f"{error}"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(
            f"deepspeed_config_file {path} of the launcher's configuration is not a JSON object"
        )
    return config


def _value(word: str) -> Any:
    """A number where it is one; the launcher has words alone."""
    try:
        return json.loads(word)
    except ValueError:
        return word


def _put(config: dict[str, Any], key: str, value: Any) -> None:
    section = config
    *parents, leaf = key.split(".")
    for parent in parents:
        section = section.setdefault(parent, {})
    if section.get(leaf, value) not in (value, "auto"):
        raise ConfigError(
            f"the launcher's configuration says {key} twice: {section[leaf]!r} in deepspeed_config_file, and "
            f"{value!r} beside it; leave one of them out"
        )
    section[leaf] = value


def _taken(config: dict[str, Any], key: str) -> Any:
    """The value at a dotted key, which is there no more; None where there is none."""
    *parents, leaf = key.split(".")
    for parent in parents:
        found = config.get(parent)
        if not isinstance(found, dict):
            return None
        config = found
    return config.pop(leaf, None)


def launcher_file(stage: int, precision: str, own_file: str | None) -> dict[str, Any]:
    """accelerate's configuration file for a stage; ``own_file`` is the path of DeepSpeed's own, if any."""
    if own_file is not None:  # which says everything itself, as accelerate wants it
        settings: dict[str, Any] = {"deepspeed_config_file": own_file}
        return {"distributed_type": "DEEPSPEED", "deepspeed_config": settings}
    settings = {"zero_stage": stage}
    if stage == 3:
        settings["zero3_init_flag"] = True
    return {"distributed_type": "DEEPSPEED", "deepspeed_config": settings, "mixed_precision": precision}


def own_file(stage: int) -> dict[str, Any]:
    """A ``ds_config`` in which the training configuration decides what it knows of."""
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    if stage > 0:
        zero["reduce_bucket_size"] = "auto"
        zero["offload_optimizer"] = {"device": "none"}
    if stage == 3:
        zero["stage3_prefetch_bucket_size"] = "auto"
        zero["stage3_param_persistence_threshold"] = "auto"
        zero["offload_param"] = {"device": "none"}
    return {
        **dict.fromkeys((*auto, "gradient_clipping"), "auto"),
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_optimization": zero,
    }
