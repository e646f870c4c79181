"""FSDP2's placements under experts and tensors that ranks share: trained as one process trains, and saved."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

import zerostart
from tests.identity.test_parallel_fsdp2 import train
from tests.parity import checkpoint, differences, optimizer, reference
from tests.ranks import run_ranks

SLOW = pytest.mark.slow


def last(parameter: nn.Parameter) -> Shard | None:
    """Whatever is no vector along its last dimension."""
    return Shard(-1) if parameter.dim() > 1 else None


def offloaded() -> dict[str, Any]:
    return {"offload_policy": CPUOffloadPolicy(pin_memory=False)}


PLACED: dict[str, Callable[[], dict[str, Any]]] = {
    "offload": offloaded,
    "replicas": lambda: {"replicate": 2},
    "dimensions": lambda: {"shard_placement_fn": last},
    "all": lambda: {"replicate": 2, "shard_placement_fn": last, **offloaded()},
}
EXPERTS, TENSORS = {"expert_parallel": 2}, {"tensor_parallel": 2}
BOTH = EXPERTS | TENSORS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "world", "placed", "axes"),
    [
        ("mixtral", 4, "all", BOTH),
        *(
            pytest.param(*case, marks=SLOW)
            for case in [
                ("qwen3", 2, "offload", TENSORS),
                ("qwen3", 4, "replicas", TENSORS),
                ("qwen3", 4, "dimensions", TENSORS),
                ("qwen3", 4, "all", TENSORS),
                ("qwen3_moe", 2, "offload", EXPERTS),
                ("qwen3_moe", 4, "replicas", EXPERTS),
                ("gpt_oss", 4, "dimensions", EXPERTS),
                ("deepseek_v3", 4, "all", EXPERTS),
                ("gpt_oss", 2, "offload", BOTH),
                ("deepseek_v3", 4, "replicas", BOTH),
                ("mixtral", 4, "dimensions", BOTH),
                ("qwen3", 8, "all", TENSORS),
                ("mixtral", 8, "all", BOTH),
            ]
        ),
    ],
)
def test_trains_as_in_one_process(
    kind: str, world: int, placed: str, axes: dict[str, int], folder: Path
) -> None:
    path = checkpoint(kind, folder)
    wanted = reference(path)
    for found in run_ranks(train, world, path, 1, {**axes, "engine_config": PLACED[placed]()}):
        assert differences(found, wanted) == []


@pytest.mark.slow
@pytest.mark.parametrize(("world", "replicas"), [(2, 1), (4, 1), (4, 2)])
def test_gradients_of_experts_reduced_in_half_precision(world: int, replicas: int, folder: Path) -> None:
    """The gradient of an expert with one owner is divided once, as all others."""
    path = checkpoint("qwen3_moe", folder)
    wanted = reference(path)
    config = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16), "replicate": replicas}
    for found in run_ranks(train, world, path, 1, {**EXPERTS, "engine_config": config}):
        assert differences(found, wanted, tolerance=1e-2) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("mixtral", ("all", BOTH), ("dimensions", EXPERTS)),
        *(
            pytest.param(*case, marks=SLOW)
            for case in [
                ("qwen3", ("replicas", TENSORS), ("offload", TENSORS)),
                ("gpt_oss", ("dimensions", EXPERTS), ("all", EXPERTS)),
                ("qwen3_moe", ("offload", EXPERTS), ("replicas", EXPERTS)),
                ("deepseek_v3", ("replicas", BOTH), ("all", BOTH)),
            ]
        ),
    ],
)
def test_read_saved_and_resumed(kind: str, before: Any, after: Any, folder: Path, tmp_path: Path) -> None:
    path = checkpoint(kind, folder)
    results = run_ranks(keep, 4, path, before, after, tmp_path)
    for rank, (read, planned, first, second) in enumerate(results):
        assert read == planned, f"rank {rank}"
        assert first.keys() == second.keys()
        for name, tensor in first.items():
            torch.testing.assert_close(second[name], tensor, rtol=1e-5, atol=1e-7, msg=name)
    saved, again = (unsharded(tmp_path / folder) for folder in ("saved", "state/model"))
    for name, tensor in results[0][-1].items():
        assert torch.equal(saved[name], again[name]), name
        # A buffer, which no step changes, is there as well.
        assert name.endswith("correction_bias") or not torch.equal(saved[name], tensor), name


def keep(path: Path, before: Any, after: Any, folder: Path) -> tuple[int, int, Any, Any]:
    """Bytes read and planned; and the weights after a step more, there and where it was resumed."""
    placed, axes = before
    options: dict[str, Any] = {"engine": "fsdp2", "engine_config": PLACED[placed](), **axes}
    model = zerostart.load(path, progress=False, **options)
    read = zerostart.report(model).read_bytes
    planned = zerostart.plan(path, world_size=4, **options).ranks[dist.get_rank()].read_bytes
    digest, optim = zerostart.digest(model), optimizer(model)
    step(model, optim, axes, 1)
    zerostart.save(model, folder / "saved")
    zerostart.save_state(folder / "state", model, optim)
    step(model, optim, axes, 2)
    placed, axes = after
    other = zerostart.load(path, engine="fsdp2", engine_config=PLACED[placed](), progress=False, **axes)
    assert zerostart.digest(other) == digest
    resumed = optimizer(other)
    zerostart.load_state(folder / "state", other, resumed)
    step(other, resumed, axes, 2)
    return read, planned, whole(model), whole(other)


def step(model: nn.Module, optim: torch.optim.Optimizer, axes: dict[str, int], seed: int) -> None:
    """One step of all ranks on the same tokens, so that it is the same step on any mesh."""
    tokens = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(seed))
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optim.step()
    optim.zero_grad()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in zerostart.full_tensors(model, rank=None) if tensor is not None}


def unsharded(path: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(path).state_dict())


@pytest.mark.parametrize(
    "axes", [BOTH, pytest.param(TENSORS, marks=SLOW), pytest.param(EXPERTS, marks=SLOW)], ids=str
)
def test_plans_no_more_than_the_slices(axes: dict[str, int], folder: Path) -> None:
    path = checkpoint("mixtral", folder, hidden_size=256, intermediate_size=512, head_dim=64)
    stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    for placed, replicas in (("replicas", 2), ("dimensions", 1), ("offload", 1), ("all", 2)):
        config = PLACED[placed]()
        plan = zerostart.plan(path, world_size=8, engine="fsdp2", engine_config=config, **axes)  # type: ignore[arg-type]
        read = [rank.read_bytes for rank in plan.ranks]
        assert read[: 8 // replicas] * replicas == read
        assert abs(sum(read) / (stored * replicas) - 1) < 0.01
        # Buffers, which no checkpoint has, aside.
        on_device = {rank.device_bytes for rank in plan.ranks}
        assert max(on_device) < 1024 if "offload_policy" in config else min(on_device) >= max(read) / 1.01
