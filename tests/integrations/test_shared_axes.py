"""The Trainer whose ranks share tensors, sequences or replicas by accelerate's ``ParallelismConfig``."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.integrations.scripts import fsdp2, sequences, trainer_script, zero3
from tests.ranks import run_ranks
from tests.tiny import TinyCheckpoints

MODEL = "qwen3_even"
ROWS = 2


def axes(**sizes: int) -> dict[str, str]:
    """Return the environment that ``accelerate launch`` would set."""
    named = {f"PARALLELISM_CONFIG_{key.upper()}_SIZE": str(size) for key, size in sizes.items()}
    return {**fsdp2(), "ACCELERATE_USE_PARALLELISM_CONFIG": "true", **named}


def run(
    path: Path, out: Path, environment: dict[str, str], adopt: Any, world: int, rows: int, cpu: bool = True
) -> Any:
    given = {"batch_size": rows, **({"use_cpu": True} if cpu else {})}
    found = run_ranks(
        trainer_script, world, path, out, environment, given, adopt, {}, process_group=False, timeout=200
    )
    assert all(one["losses"] == found[0]["losses"] for one in found)
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "batches"),
    [({"cp": 2, "tp": 2}, 1), ({"dp_shard": 2, "tp": 2}, 2), ({"dp_replicate": 2, "dp_shard": 2}, 4)],
    ids=str,
)
def test_trainer(sizes: dict[str, int], batches: int, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    path = checkpoints(MODEL)
    ours = run(path, tmp_path / "ours", axes(**sizes), {}, 4, ROWS)
    alone = run(path, tmp_path / "alone", {}, None, 1, ROWS * batches)
    assert ours["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert ours["norms"] == pytest.approx(alone["norms"], rel=1e-5)
    wanted = load_file(tmp_path / "alone" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "ours" / "model.safetensors").items():
        # Adam moves an element by its gradient's sign, however small that is.
        assert (tensor - wanted[name]).norm() <= 1e-3 * wanted[name].norm(), name
    assert ours["read"] <= sum(file.stat().st_size for file in path.glob("*.safetensors")) * 0.8


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_sequences_are_shared_on_deepspeed(stage: int, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    zero = {"stage": stage}
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    environment = {**zero3(tmp_path, zero_optimization=zero), **sequences("SP")}
    # One row: on the CPU DeepSpeed's own cutting of more leaves labels that transformers cannot look at.
    stock = run(checkpoints(MODEL), tmp_path / "stock", environment, None, 2, 1, cpu=False)
    ours = run(checkpoints(MODEL), tmp_path / "ours", environment, {}, 2, 1, cpu=False)
    assert ours["losses"] == stock["losses"]
    assert ours["norms"] == pytest.approx(stock["norms"], rel=1e-6)


@pytest.mark.slow
def test_sequences_are_shared_on_fsdp2(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    """Compare with one process: torch has no context parallelism of its own on CPUs."""
    environment = {**fsdp2(), **sequences("CP")}
    ours = run(checkpoints(MODEL), tmp_path / "ours", environment, {}, 2, ROWS)
    alone = run(checkpoints(MODEL), tmp_path / "alone", {}, None, 1, ROWS)
    assert ours["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert ours["norms"] == pytest.approx(alone["norms"], rel=1e-5)
