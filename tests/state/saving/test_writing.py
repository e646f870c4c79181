"""Write tensors from shards of any layout."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from zerostart.checkpoint.write.shards import plan_shards
from zerostart.checkpoint.write.writer import CheckpointWriter
from zerostart.distributed.world import World
from zerostart.engines import Shard
from zerostart.errors import CheckpointError, WriteError
from zerostart.geometry.layout import Layout, dimension_shard, flat_partition, replicated
from zerostart.recipe import Recipe, SymbolicTensor, Target, spelling
from zerostart.state.saving.writing import (
    LocalPlace,
    Outgoing,
    Publication,
    describe_share,
    plan_own_writes,
    write_tensors,
)
from zerostart.transfer.writing import write_out

Tensors = dict[str, torch.Tensor]


def fuse_experts(t: Tensors) -> Tensors:
    gate = torch.stack([t[f"experts.{n}.gate"] for n in range(3)])
    up = torch.stack([t[f"experts.{n}.up"] for n in range(3)])
    return {"gate_up": torch.cat([gate, up], dim=1)}


def permute_heads(t: Tensors) -> Tensors:
    return {"q": t["q"].view(3, 2, 5, 7).transpose(1, 2).reshape(30, 7), "w": t["w"].t().contiguous()}


def split_interleaved_heads(t: Tensors) -> Tensors:
    heads = t["qkv"].view(4, 3, 5, 6)
    return {name: heads[:, n].reshape(20, 6) for n, name in enumerate("qkv")}


CONVERSIONS: dict[str, tuple[Callable[[Tensors], Tensors], dict[str, tuple[int, ...]]]] = {
    "fused": (fuse_experts, {f"experts.{n}.{part}": (4, 5) for n in range(3) for part in ("gate", "up")}),
    "permuted": (permute_heads, {"q": (30, 7), "w": (11, 13)}),
    "interleaved": (split_interleaved_heads, {"qkv": (60, 6)}),
}
LAYOUTS: dict[str, Callable[[tuple[int, ...], int, int], tuple[Layout, tuple[int, int]]]] = {
    "flat": lambda shape, rank, size: (flat_partition(shape, rank, size), (0, 1)),
    "rows": lambda shape, rank, size: (dimension_shard(shape, 0, rank, size), (0, 1)),
    "columns": lambda shape, rank, size: (dimension_shard(shape, len(shape) - 1, rank, size), (0, 1)),
    "replicas": lambda shape, rank, size: (replicated(shape), (rank, size)),
}


def random_tensors(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> Tensors:
    torch.manual_seed(3)
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def make_shard(name: str, whole: torch.Tensor, layout: Layout, replica: tuple[int, int] = (0, 1)) -> Shard:
    storage = torch.full((layout.numel,), float("nan"), dtype=whole.dtype)
    for first, count, start in layout.runs():
        storage[start : start + count] = whole.reshape(-1)[first : first + count]
    return Shard(name, layout, storage, lambda _: layout, replica)


def shards_of(conversion: str, tensors: Tensors, layout: str, rank: int, size: int) -> list[Outgoing]:
    """Return one rank's shards of the converted ``tensors``."""
    convert, shapes = CONVERSIONS[conversion]
    symbols = {n: SymbolicTensor.of(n, shape, tensors[n].dtype) for n, shape in shapes.items()}
    traced = convert(symbols)  # type: ignore[arg-type]
    outgoing = []
    for name, whole in convert(tensors).items():
        rank_layout, replica = LAYOUTS[layout](tuple(whole.shape), rank, size)
        target = Target(name, tuple(whole.shape), whole.dtype)
        recipe = Recipe(target, traced[name].value.pieces)  # type: ignore[attr-defined]
        outgoing.append(Outgoing(recipe, make_shard(name, whole, rank_layout, replica)))
    return outgoing


@pytest.mark.parametrize("chunk", [64, 1 << 20])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_ranks_restore_converted_tensors(
    conversion: str, layout: str, size: int, chunk: int, tmp_path: Path
) -> None:
    """Files hold the tensors before the conversion."""
    tensors = random_tensors(CONVERSIONS[conversion][1], torch.bfloat16)
    files = plan_shards([(n, spelling(t.dtype), tuple(t.shape)) for n, t in tensors.items()], 300)
    written = 0
    counts: dict[str, torch.Tensor] = {n: torch.zeros(t.numel()) for n, t in tensors.items()}

    def count_writes(name: str, first: int, step: int, data: torch.Tensor) -> None:
        for row, elements in enumerate(data):
            begin = first + row * step
            counts[name][begin : begin + len(elements)] += 1

    with CheckpointWriter(tmp_path, files) as writer:
        for rank in range(size):
            plan, storages = plan_own_writes(files, shards_of(conversion, tensors, layout, rank, size), chunk)
            assert all(write.span * write.dtype.itemsize <= chunk for write in plan.writes)
            written += write_out(plan, storages, writer, 2, count_writes)
    assert written == files.total_size
    assert all(bool((count == 1).all()) for count in counts.values()), "an element written twice, or never"
    saved: Tensors = {}
    for file in files.files:
        saved.update(load_file(tmp_path / file.name))
    assert saved.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(saved[name].view(torch.int16), tensor.view(torch.int16)), name


def test_elements_are_cast_while_writing(tmp_path: Path) -> None:
    whole = torch.randn(40, 5)
    shard = make_shard("w", whole, replicated((40, 5)))
    write_tensors(
        Publication(LocalPlace(tmp_path)),
        [("w", "BF16", (40, 5))],
        [describe_share("w", shard)],
        World(0, 1, None),
    )
    assert torch.equal(load_file(tmp_path / "model.safetensors")["w"], whole.to(torch.bfloat16))


def test_impossible_directory_is_an_error(tmp_path: Path) -> None:
    """Cleaning up does not hide the first error."""
    (tmp_path / "file").touch()
    shard = make_shard("w", torch.zeros(2), replicated((2,)))
    with pytest.raises(WriteError, match="file: the directory cannot be created"):
        write_tensors(
            Publication(LocalPlace(tmp_path / "file")),
            [("w", "F32", (2,))],
            [describe_share("w", shard)],
            World(0, 1, None),
        )


def test_incomplete_tensor_is_not_saved(tmp_path: Path) -> None:
    half = make_shard("w", torch.randn(8, 2), dimension_shard((8, 2), 0, 0, 2))
    with pytest.raises(CheckpointError, match="w: 8 elements"):
        write_tensors(
            Publication(LocalPlace(tmp_path)),
            [("w", "BF16", (8, 2))],
            [describe_share("w", half)],
            World(0, 1, None),
        )
