"""Run every verb on the pretend accelerator, on both engines and all stages."""

from pathlib import Path
from typing import Any

import pytest

from tests.accelerator import scenes
from tests.accelerator.verbs import all_verbs
from tests.npu_ranks import run_npu_ranks
from tests.tiny import TinyCheckpoints

#: The first test of a run compiles DeepSpeed's operation and the accelerator.
pytestmark = pytest.mark.timeout(900)


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


@pytest.mark.slow
def test_fsdp2_without_a_set_device(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    """Like the README's script, which names no backend and sets no device."""
    run("qwen3", checkpoints, tmp_path, "fsdp2", 3, {})


def test_deepspeed_3(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    run("qwen3", checkpoints, tmp_path, "deepspeed", 3, {}, deepspeed_config(3), "cpu:gloo,npu:hccl")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["hccl", "cpu:gloo,npu:hccl", None])
def test_fsdp2_on_a_set_device(backend: str | None, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
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
def test_fsdp2(
    kind: str, stage: int, options: dict[str, Any], checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    run(kind, checkpoints, tmp_path, "fsdp2", stage, options)


@pytest.mark.slow
def test_fsdp2_offloaded(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    config = {"offload_policy": CPUOffloadPolicy(pin_memory=True)}
    run("qwen3", checkpoints, tmp_path, "fsdp2", 3, {}, config, "cpu:gloo,npu:hccl")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed(stage: int, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    run("qwen3", checkpoints, tmp_path, "deepspeed", stage, {}, deepspeed_config(stage))


@pytest.mark.slow
def test_deepspeed_parameters_offloaded(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    config = deepspeed_config(3, offload_param={"device": "cpu", "pin_memory": True})
    run("qwen3", checkpoints, tmp_path, "deepspeed", 3, {}, config)


@pytest.mark.slow
def test_deepspeed_experts(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    config = deepspeed_config(3)
    run("qwen3_moe_even", checkpoints, tmp_path, "deepspeed", 3, {"expert_parallel": 2}, config)


@pytest.mark.slow
def test_replicas(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    losses = run_npu_ranks(
        all_verbs, 4, checkpoints("qwen3"), tmp_path, "fsdp2", 3, {}, {"replicate": 2}, timeout=250
    )
    assert len(losses) == 4


@pytest.mark.slow
def test_secondary_partitions(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    config = deepspeed_config(3, zero_hpz_partition_size=2)
    arguments = (checkpoints("qwen3"), tmp_path, "deepspeed", 3, {}, config)
    assert len(run_npu_ranks(all_verbs, 4, *arguments, timeout=250)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zero3", "zero2", "fsdp2"])
@pytest.mark.parametrize("library", ["trainer", "accelerate", "peft"])
def test_adoption(library: str, kind: str, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    """Compare losses with those of the library without zerostart."""
    from tests.integrations import scripts

    environments = {
        "zero3": lambda: scripts.zero3(tmp_path),
        "zero2": lambda: scripts.zero3(tmp_path, zero_optimization={"stage": 2}),
        "fsdp2": scripts.fsdp2,
    }
    arguments = (library, environments[kind]())
    path = checkpoints("qwen3")
    stock, ours = (
        run_npu_ranks(scenes.run_script, 2, path, tmp_path / name, *arguments, adopt)[0]
        for name, adopt in (("stock", None), ("ours", {}))
    )
    assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-5)
    assert ours["norms"] == pytest.approx(stock["norms"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "stage", "transformer", "ranks"),
    [("fsdp2", 3, "shard", 2), ("deepspeed", 3, "shard", 2), ("fsdp2", 3, "offload", 1)],
)
def test_a_pipeline_draws_the_same_picture_as_on_the_host(
    engine: str, stage: int, transformer: str, ranks: int, tmp_path: Path
) -> None:
    from tests.integrations.pipelines.tiny_pipelines import make_pipeline

    path = make_pipeline("wan", tmp_path / "wan")
    placement = {"transformer": transformer, "vae": "replicate", "text_encoder": "offload"}
    for error in run_npu_ranks(scenes.compare_picture, ranks, path, "wan", engine, stage, placement):
        assert error < 1e-5
