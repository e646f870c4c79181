"""Evaluate a sharded model with the HF Trainer before and after training."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.scripts import Data, fsdp2, training_arguments, zero3
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints

ORDERS = {
    "evaluated-first": ("evaluate", "predict", "evaluate", "train", "evaluate"),
    "trained-twice": ("train", "train", "evaluate"),
}


def trainer_script(
    path: Path,
    out: Path,
    environment: dict[str, str],
    calls: tuple[str, ...],
    adopt: bool,
    fresh: bool = False,
) -> Any:
    """Call methods of one Trainer, and return the losses that they report."""
    os.environ.update(environment)
    from transformers import AutoModelForCausalLM, Trainer

    if adopt:
        import zerostart

        zerostart.enable()
    args = training_arguments(
        out,
        max_steps=2,
        per_device_train_batch_size=4 // int(os.environ.get("WORLD_SIZE", "1")),
        per_device_eval_batch_size=2,
        eval_on_start=True,
        seed=3,
        use_cpu=True,
    )
    model = AutoModelForCausalLM.from_pretrained(path)
    trainer = Trainer(model=model, args=args, train_dataset=Data(), eval_dataset=Data())
    losses = []
    for call in calls:
        if call == "train":
            trainer.optimizer = None if fresh else trainer.optimizer
            trainer.train()
            logs = trainer.state.log_history
            losses.append(
                [e.get("loss", e.get("eval_loss")) for e in logs if "loss" in e or "eval_loss" in e]
            )
        elif call == "evaluate":
            losses.append(trainer.evaluate()["eval_loss"])
        else:
            losses.append(float(torch.as_tensor(trainer.predict(Data()).predictions).double().mean()))
    return losses


def flatten(losses: list[Any]) -> list[float]:
    return [v for entry in copy.deepcopy(losses) for v in (entry if isinstance(entry, list) else [entry])]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero3", "zero2", "fsdp2"])
@pytest.mark.parametrize("order", ORDERS)
def test_calls_of_one_trainer(engine: str, order: str, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    path = checkpoints("qwen3")
    stages = {"zero3": 3, "zero2": 2}
    environment = (
        zero3(tmp_path / "config", zero_optimization={"stage": stages[engine]})
        if engine in stages
        else fsdp2()
    )
    fresh = engine in stages  # on DeepSpeed the Trainer makes a new optimizer for each call of train
    [expected] = run_ranks(
        trainer_script, 1, path, tmp_path / "one", {}, ORDERS[order], False, fresh, process_group=False
    )
    first, second = run_ranks(
        trainer_script, 2, path, tmp_path / "two", environment, ORDERS[order], True, process_group=False
    )
    assert first == second
    assert flatten(first) == pytest.approx(flatten(expected), rel=1e-4)
