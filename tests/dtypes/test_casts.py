"""Casts on read equal those of eager torch."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from zerostart.checkpoint.source import open_catalog
from zerostart.geometry.layout import Layout, dimension_shard, flat_partition
from zerostart.recipe import Recipe, SymbolicTensor, Target, torch_dtype
from zerostart.transfer import Progress, execute
from zerostart.transfer.planning import Destination, PlanOptions, join

STORED_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
MODEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPE, WORLD = (7, 9), 3


def difficult_values(dtype: torch.dtype) -> torch.Tensor:
    """Ties, overflow, subnormals, signed zeros and NaN."""
    torch.manual_seed(0)
    values = torch.randn(SHAPE, dtype=torch.float64) * 10 ** torch.randint(-9, 5, SHAPE).double()
    special = [1 + 2**-9, 1 + 3 * 2**-9, 1 + 2**-12, 65504.0, 65520.0, 1e38, 3.4e38, 2**-24, 2**-25, 1e-40]
    special += [0.0, -0.0, float("nan"), float("inf"), -float("inf")]
    values.view(-1)[: len(special)] = torch.tensor(special, dtype=torch.float64)
    return values.to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes, with one bit pattern for NaN."""
    return torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor).view(torch.uint8)


@pytest.mark.parametrize("dtype", MODEL_DTYPES, ids=str)
@pytest.mark.parametrize("stored", STORED_DTYPES, ids=str)
def test_cast_on_read_equals_eager_torch(stored: torch.dtype, dtype: torch.dtype, tmp_path: Path) -> None:
    source = difficult_values(stored)
    save_file({"w": source}, tmp_path / "model.safetensors")
    catalog = open_catalog(tmp_path)
    entry = catalog.tensors["w"]
    symbol = SymbolicTensor.of("w", entry.shape, torch_dtype(entry.dtype, "w"), entry.strides)
    for shape, pieces, expected in (
        (SHAPE, symbol.pieces, source.to(dtype)),
        (SHAPE[::-1], symbol.transpose(0, 1).pieces, source.to(dtype).t()),
    ):
        recipe = Recipe(Target("w", shape, dtype), pieces)
        for rank in range(WORLD):
            for layout in (flat_partition(shape, rank, WORLD), dimension_shard(shape, 0, rank, WORLD)):
                destination = Destination("w", layout.numel, layout.owned, dtype, direct=True)
                for chunk in (16, 1 << 20):
                    plan = join(catalog, [(recipe, layout, destination)], PlanOptions(chunk_size=chunk))
                    storage = torch.full((layout.numel,), 7.0, dtype=dtype)
                    execute(plan, [storage], Progress(plan.read_bytes, shown=False), threads=1)
                    assert torch.equal(bits(storage), bits(part_of(expected, layout)))


def part_of(whole: torch.Tensor, layout: Layout) -> torch.Tensor:
    part = torch.zeros(layout.numel, dtype=whole.dtype)
    for first, count, to in layout.runs():
        part[to : to + count] = whole.reshape(-1)[first : first + count]
    return part
