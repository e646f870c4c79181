"""Slices of columns and transposes: many short runs of a file in few calls."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from zerostart.checkpoint.source import open_catalog
from zerostart.errors import ReadError
from zerostart.geometry.layout import Layout, dimension_shard, flat_partition
from zerostart.recipe import Recipe, SymbolicTensor, Target
from zerostart.transfer import FileReader, Progress, Rows, execute
from zerostart.transfer.planning import Destination, Plan, join

WORLD = 3


def make_plan(path: Path, symbolic: torch.Tensor, layout: Layout, dtype: torch.dtype, direct: bool) -> Plan:
    recipe = Recipe(Target("p", tuple(symbolic.shape), dtype), symbolic.pieces)
    destination = Destination("p", layout.numel, layout.owned, dtype, direct)
    return join(open_catalog(path), [(recipe, layout, destination)])


def filled(plan: Plan) -> torch.Tensor:
    (destination,) = plan.destinations
    storage = torch.full((destination.numel,), 7, dtype=destination.dtype)
    assert execute(plan, [storage], Progress(0, shown=False), threads=2) == plan.read_bytes
    return storage


def test_columns(tmp_path: Path) -> None:
    whole = torch.randn(301, 1000)
    path = tmp_path / "model.safetensors"
    save_file({"w": whole}, path)
    symbolic = SymbolicTensor.of("w", (301, 1000), torch.float32)
    for rank, expected in enumerate(whole.chunk(WORLD, 1)):
        layout = dimension_shard((301, 1000), 1, rank, WORLD)
        plan = make_plan(path, symbolic, layout, torch.float32, direct=True)
        assert plan.read_bytes == expected.nbytes
        assert len(plan.reads) == 1
        assert plan.reads[0].direct
        assert torch.equal(filled(plan)[: layout.owned], expected.reshape(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("direct", [True, False])
def test_columns_beside_columns(tmp_path: Path, dtype: torch.dtype, direct: bool) -> None:
    """Rows with gaps in source and destination; with a cast they are staged."""
    a, b = torch.randn(70, 900), torch.randn(70, 900)
    path = tmp_path / "model.safetensors"
    save_file({"a": a, "b": b}, path)
    sa, sb = (SymbolicTensor.of(n, (70, 900), torch.float32) for n in "ab")
    symbolic = torch.cat([sa[:, 100:400], sb[:, 500:]], 1)
    plan = make_plan(path, symbolic, flat_partition((70, 700), 0, 1), dtype, direct)
    assert plan.read_bytes == 70 * 700 * 4
    expected = torch.cat([a[:, 100:400], b[:, 500:]], 1).to(dtype)
    assert torch.equal(filled(plan), expected.reshape(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_transposed_experts(tmp_path: Path, dtype: torch.dtype) -> None:
    stored = torch.randn(3, 640, 700).to(torch.bfloat16)
    path = tmp_path / "model.safetensors"
    save_file({"w": stored}, path)
    symbolic = SymbolicTensor.of("w", tuple(stored.shape), stored.dtype).transpose(1, 2)
    expected = stored.transpose(1, 2).to(dtype).reshape(-1)
    for rank in range(WORLD):
        layout = flat_partition((3, 700, 640), rank, WORLD)
        plan = make_plan(path, symbolic, layout, dtype, direct=True)
        ((first, count, _),) = layout.runs()
        assert torch.equal(filled(plan)[:count], expected[first : first + count])


def test_one_column(tmp_path: Path) -> None:
    whole = torch.randn(3000, 600)
    path = tmp_path / "model.safetensors"
    save_file({"w": whole}, path)
    symbolic = SymbolicTensor.of("w", (3000, 600), torch.float32)[:, 17:18]
    plan = make_plan(path, symbolic, flat_partition((3000, 1), 0, 1), torch.float32, direct=True)
    assert plan.read_bytes == 3000 * 4
    assert torch.equal(filled(plan), whole[:, 17])


def test_rows_beyond_the_end_name_file_and_offset(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(os.urandom(20_000))
    ended = pytest.raises(ReadError, match=rf"{path} ended at offset 12000")
    with ended, FileReader([str(path)], [20_000]) as reader:
        reader.gather(0, 0, Rows(4, 100, 5000), memoryview(bytearray(400)), 100)
        os.truncate(path, 12_000)
        reader.gather(0, 0, Rows(4, 100, 5000), memoryview(bytearray(400)), 100)
