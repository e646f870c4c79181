"""Train by accelerate's ``ParallelismConfig``: tensors, sequences and replicas."""

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
    sizes_by_name = {f"PARALLELISM_CONFIG_{key.upper()}_SIZE": str(size) for key, size in sizes.items()}
    return {**fsdp2(), "ACCELERATE_USE_PARALLELISM_CONFIG": "true", **sizes_by_name}


def run(
    path: Path, out: Path, environment: dict[str, str], adopt: Any, world: int, rows: int, cpu: bool = True
) -> Any:
    options = {"batch_size": rows, **({"use_cpu": True} if cpu else {})}
    results = run_ranks(
        trainer_script, world, path, out, environment, options, adopt, {}, process_group=False, timeout=200
    )
    assert all(result["losses"] == results[0]["losses"] for result in results)
    return results[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "batches"),
    [({"cp": 2, "tp": 2}, 1), ({"dp_shard": 2, "tp": 2}, 2), ({"dp_replicate": 2, "dp_shard": 2}, 4)],
    ids=str,
)
def test_trainer_on_several_axes(
    sizes: dict[str, int], batches: int, checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path = checkpoints(MODEL)
    ours = run(path, tmp_path / "ours", axes(**sizes), {}, 4, ROWS)
    single = run(path, tmp_path / "single", {}, None, 1, ROWS * batches)
    assert ours["losses"] == pytest.approx(single["losses"], rel=1e-5)
    assert ours["norms"] == pytest.approx(single["norms"], rel=1e-5)
    expected = load_file(tmp_path / "single" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "ours" / "model.safetensors").items():
        # Adam steps by a gradient's sign, however small the gradient is.
        assert (tensor - expected[name]).norm() <= 1e-3 * expected[name].norm(), name
    assert ours["read"] <= sum(file.stat().st_size for file in path.glob("*.safetensors")) * 0.8


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_sequences_are_shared_on_deepspeed(stage: int, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    zero = {"stage": stage}
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    environment = {**zero3(tmp_path, zero_optimization=zero), **sequences("SP")}
    # One row: DeepSpeed's own slices of more rows are not contiguous on the CPU, and transformers fails.
    stock = run(checkpoints(MODEL), tmp_path / "stock", environment, None, 2, 1, cpu=False)
    ours = run(checkpoints(MODEL), tmp_path / "ours", environment, {}, 2, 1, cpu=False)
    assert ours["losses"] == stock["losses"]
    assert ours["norms"] == pytest.approx(stock["norms"], rel=1e-6)


@pytest.mark.slow
def test_sequences_are_shared_on_fsdp2(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    """Compare with one process: torch has no context parallelism on CPUs."""
    environment = {**fsdp2(), **sequences("CP")}
    ours = run(checkpoints(MODEL), tmp_path / "ours", environment, {}, 2, ROWS)
    single = run(checkpoints(MODEL), tmp_path / "single", {}, None, 1, ROWS)
    assert ours["losses"] == pytest.approx(single["losses"], rel=1e-5)
    assert ours["norms"] == pytest.approx(single["norms"], rel=1e-5)
