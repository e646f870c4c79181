"""Placements of FSDP2 work like torch's ``fully_shard``."""

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

import zerostart
from tests.identity.snapshots import Snapshot, pretrained, same_bits
from tests.ranks import run_ranks
from tests.tiny import TINY, TinyCheckpoints

KIND = "qwen3_moe_aligned"
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def widest_dimension(parameter: nn.Parameter) -> Shard | None:
    """Shard experts and even matrices along inner dimensions."""
    if parameter.dim() == 3:
        return Shard(1)
    if parameter.dim() == 2 and parameter.shape[-1] % 2 == 0:
        return Shard(-1)
    return None


def interleaved_mesh() -> Any:
    """Make a mesh with replicas on neighbouring ranks."""
    from torch.distributed.device_mesh import DeviceMesh

    ranks = torch.arange(dist.get_world_size()).view(-1, 2).t().contiguous()
    return DeviceMesh("cpu", ranks, mesh_dim_names=("copies", "pieces"))


#: Function that makes ``engine_config`` on a rank, and the world size.
PLACEMENTS: dict[str, tuple[Callable[[], dict[str, Any]], int]] = {
    "plain": (dict, 2),
    "cpu-offload": (lambda: {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, 2),
    "mixed-precision": (lambda: {"mp_policy": BF16}, 2),
    "replicas": (lambda: {"replicate": 2}, 4),
    "replicas-only": (lambda: {"replicate": 2, "reshard_after_forward": True}, 2),
    "replicas-by-mesh": (lambda: {"mesh": interleaved_mesh()}, 4),
    "other-dimensions": (lambda: {"shard_placement_fn": widest_dimension}, 2),
    "replicas-other-dimensions": (lambda: {"replicate": 2, "shard_placement_fn": widest_dimension}, 4),
    "kept-gathered": (lambda: {"reshard_after_forward": False}, 3),
    "gathered-in-pairs": (lambda: {"reshard_after_forward": 2}, 4),
    "units-by-name": (lambda: {"wrap": ["model.layers.*", "Qwen3MoeAttention", nn.Embedding]}, 2),
}


#: Options that are combined with each other, on meshes with and without replicas.
COMBINED_OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "cpu-offload": lambda: {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "mixed-precision": lambda: {"mp_policy": BF16},
    "other-dimensions": lambda: {"shard_placement_fn": widest_dimension},
}


@pytest.fixture(scope="module")
def path(checkpoints: TinyCheckpoints) -> Path:
    return checkpoints(KIND)


@pytest.fixture(scope="module")
def reference(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("references") / "whole.pt"
    torch.save(Snapshot.of(pretrained(path, torch.float32)).state, file)
    return file


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_placements_train_like_fully_shard(placement: str, path: Path, reference: Path) -> None:
    world_size = PLACEMENTS[placement][1]
    for rank, (ours, stock, planned, read) in enumerate(
        run_ranks(compare, world_size, placement, path, reference)
    ):
        assert ours == stock
        assert planned == read, f"rank {rank}"


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_combinations_train_like_fully_shard(replicas: int, path: Path, reference: Path) -> None:
    for rank, results in enumerate(
        run_ranks(compare_all, 2 * replicas, replicas, path, reference, timeout=280)
    ):
        for names, (ours, stock, planned, read) in results.items():
            assert ours == stock, names
            assert planned == read, (names, f"rank {rank}")


def compare_all(replicas: int, path: Path, reference: Path) -> dict[str, tuple[Any, Any, int, int]]:
    """Compare all combinations of options."""
    results = {}
    for count in range(2 if replicas == 1 else 1, len(COMBINED_OPTIONS) + 1):
        for names in itertools.combinations(COMBINED_OPTIONS, count):
            config = {"replicate": replicas} if replicas > 1 else {}
            for name in names:
                config |= COMBINED_OPTIONS[name]()
            results["+".join(names)] = compare_with(config, path, reference)
    return results


def compare(placement: str, path: Path, reference: Path) -> tuple[Any, Any, int, int]:
    return compare_with(PLACEMENTS[placement][0](), path, reference)


def compare_with(config: dict[str, Any], path: Path, reference: Path) -> tuple[Any, Any, int, int]:
    """Return two steps of both models, and bytes."""
    from transformers import AutoModelForCausalLM

    model = zerostart.load(path, engine="fsdp2", engine_config=config, progress=False)
    expected = torch.load(reference)
    for name, tensor in zerostart.full_tensors(model, rank=None):
        assert tensor is not None
        assert same_bits(tensor, expected[name]), name
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert same_bits(parameter.full_tensor().detach(), expected[name]), name

    stock = AutoModelForCausalLM.from_pretrained(path)
    shard_by_torch(stock, model, config)
    for (name, ours), theirs in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert ours.placements == theirs.placements, name
        assert same_bits(ours.to_local(), theirs.to_local()), name
    plan = zerostart.plan(path, world_size=dist.get_world_size(), engine="fsdp2", engine_config=config)
    read = zerostart.report(model).read_bytes
    return two_steps(model), two_steps(stock), plan.ranks[dist.get_rank()].read_bytes, read


def shard_by_torch(stock: nn.Module, ours: nn.Module, config: dict[str, Any]) -> None:
    """Wrap the units of ``ours``, innermost first."""
    options = {k: v for k, v in config.items() if k not in ("mesh", "replicate", "wrap")}
    size = dist.get_world_size()
    if "replicate" in config:
        sizes = (config["replicate"], size // config["replicate"])
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("copies", "pieces"))
    else:
        mesh = config.get("mesh") or init_device_mesh("cpu", (size,))
    units = [name for name, module in ours.named_modules() if isinstance(module, FSDPModule)]
    for name in reversed(units):
        fully_shard(stock.get_submodule(name), mesh=mesh, **copy.copy(options))


def two_steps(model: nn.Module) -> list[float]:
    torch.manual_seed(0)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    vocabulary = int(TINY[KIND][1]["vocab_size"])
    tokens = torch.randint(3, vocabulary, (dist.get_world_size(), 2, 16))[dist.get_rank()]
    numbers = []
    for _ in range(2):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        numbers.append(loss.item())
        numbers += [float(p.grad.to_local().double().abs().sum()) for p in model.parameters()]  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return numbers
