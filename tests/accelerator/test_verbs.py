"""Every verb on an accelerator (the pretend one of ``simulated/npu``), on both engines and all stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.accelerator.verbs import all_verbs

from npu_ranks import run_npu_ranks
from tiny import TinyCheckpoints


def deepspeed_config(stage: int, **zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, **zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def run(kind: str, checkpoints: TinyCheckpoints, folder: Path, *arguments: Any) -> list[float]:
    losses: list[list[float]] = run_npu_ranks(all_verbs, 2, checkpoints(kind), folder, *arguments)
    assert all(loss > 0 for rank in losses for loss in rank)
    return losses[0]


def test_fsdp2_without_a_device_that_was_set(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    """The README's script: no backend is named, and nobody sets the device."""
    run("qwen3", checkpoints, tmp_path, "fsdp2", 3, {})


def test_deepspeed_3(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    run("qwen3", checkpoints, tmp_path, "deepspeed", 3, {}, deepspeed_config(3), "cpu:gloo,npu:hccl")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["hccl", "cpu:gloo,npu:hccl", None])
def test_fsdp2_on_a_device_that_was_set(
    backend: str | None, checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    run("qwen3", checkpoints, tmp_path, "fsdp2", 3, {}, None, backend, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stage", "options"),
    [
        ("qwen3", 0, {}),
        ("qwen3_moe_aligned", 3, {"expert_parallel": 2}),
        ("qwen3_even", 3, {"tensor_parallel": 2}),
    ],
    ids=["stage-0", "experts", "tensors"],
)
@pytest.mark.parametrize("chosen", [False, True], ids=["not-set", "set"])
def test_fsdp2(
    kind: str, stage: int, options: dict[str, Any], chosen: bool, checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    run(kind, checkpoints, tmp_path, "fsdp2", stage, options, None, None, chosen)


@pytest.mark.slow
def test_fsdp2_offloaded(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    config = {"offload_policy": CPUOffloadPolicy(pin_memory=True)}
    run("qwen3", checkpoints, tmp_path, "fsdp2", 3, {}, config, "cpu:gloo,npu:hccl")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("chosen", [False, True], ids=["not-set", "set"])
def test_deepspeed(stage: int, chosen: bool, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    config = deepspeed_config(stage)
    run("qwen3", checkpoints, tmp_path, "deepspeed", stage, {}, config, None, chosen)


@pytest.mark.slow
def test_deepspeed_parameters_offloaded(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    config = deepspeed_config(3, offload_param={"device": "cpu", "pin_memory": True})
    run("qwen3", checkpoints, tmp_path, "deepspeed", 3, {}, config)


@pytest.mark.slow
def test_deepspeed_experts(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    config = deepspeed_config(3)
    run("qwen3_moe_even", checkpoints, tmp_path, "deepspeed", 3, {"expert_parallel": 2}, config)
