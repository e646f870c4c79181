"""Scripts whose ranks share sequences, by accelerate's ``ParallelismConfig``, with one added line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scripts import fsdp2, sequences, trainer_script, zero3

from ranks import run_ranks
from tiny import TinyCheckpoints

MODEL = "qwen3_even"


def run(path: Path, out: Path, environment: dict[str, str], adopt: Any, world: int = 2, **more: Any) -> Any:
    found = run_ranks(
        trainer_script, world, path, out, environment, more, adopt, {}, process_group=False, timeout=200
    )
    assert all(one["losses"] == found[0]["losses"] for one in found)
    return found[0]


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_trainer_on_deepspeed(stage: int, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    zero = {"stage": stage}
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    environment = {**zero3(tmp_path, zero_optimization=zero), **sequences("SP")}
    # One row: on the CPU DeepSpeed's own cutting of more leaves labels that transformers cannot look at.
    stock = run(checkpoints(MODEL), tmp_path / "stock", environment, None, batch_size=1)
    ours = run(checkpoints(MODEL), tmp_path / "ours", environment, {}, batch_size=1)
    assert ours["losses"] == stock["losses"]
    assert ours["norms"] == pytest.approx(stock["norms"], rel=1e-6)


def test_trainer_on_fsdp2(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    """accelerate's own cannot be compared: torch has no context parallelism on the CPU by itself."""
    environment = {**fsdp2(), **sequences("CP")}
    ours = run(checkpoints(MODEL), tmp_path / "ours", environment, {}, use_cpu=True)
    alone = run(checkpoints(MODEL), tmp_path / "alone", {}, None, 1, use_cpu=True)
    assert ours["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert ours["norms"] == pytest.approx(alone["norms"], rel=1e-5)
