"""A plan, executed on real files, against the same conversion done eagerly on the same bytes."""

from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.drawn import examples
from tests.recipe.graphs import Graph, graphs
from zerostart.checkpoint.source import open_catalog
from zerostart.geometry.layout import dimension_shard, flat_partition
from zerostart.recipe import Recipe, SymbolicTensor, Target
from zerostart.transfer import Progress, execute
from zerostart.transfer.planning import Destination, PlanOptions, join


@settings(max_examples=examples(40, 1200))
@given(graph=graphs(), world=st.integers(1, 4), flat=st.booleans(), data=st.data())
def test_shards_read_from_a_file_equal_the_eager_conversion(
    tmp_path: Path, graph: Graph, world: int, flat: bool, data: st.DataObject
) -> None:
    stored = data.draw(st.sampled_from([torch.float32, torch.int64, torch.bfloat16]))
    wanted = data.draw(st.sampled_from([stored, torch.float32]))
    path = tmp_path / "model.safetensors"
    save_file({name: (t % 251).to(stored) for name, t in graph.sources.items()}, path)
    catalog = open_catalog(path)
    chunk = data.draw(st.sampled_from([16, 64, 1 << 20]))
    for symbolic, eager in graph.results:
        if not eager.dim() or not eager.numel():
            continue
        expected = (eager % 251).to(stored).to(wanted)
        for rank in range(world):
            layout = (
                flat_partition(eager.shape, rank, world)
                if flat
                else dimension_shard(eager.shape, 0, rank, world)
            )
            recipe = Recipe(Target("p", tuple(eager.shape), wanted), symbolic.pieces)
            destination = Destination("p", layout.numel, layout.owned, wanted, direct=True)
            plan = join(catalog, [(recipe, layout, destination)], PlanOptions(chunk_size=chunk))
            storage = torch.full((layout.numel,), 7, dtype=wanted)
            done = execute(plan, [storage], Progress(plan.read_bytes, shown=False), threads=2)
            assert done == plan.read_bytes
            assert all(read.nbytes <= max(chunk, 8) for read in plan.reads)
            want = torch.zeros(layout.numel, dtype=wanted)
            for first, count, to in layout.runs():
                want[to : to + count] = expected.reshape(-1)[first : first + count]
            assert torch.equal(storage, want)


def test_what_is_stored_in_one_run_is_read_into_place_once(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.arange(64, dtype=torch.float32) + i for i in range(4)}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    catalog = open_catalog(path)
    wanted = []
    for name, tensor in tensors.items():
        symbolic = SymbolicTensor.of(name, tensor.shape, tensor.dtype)
        layout = flat_partition(tensor.shape, 0, 1)
        recipe = Recipe(Target(name, (64,), tensor.dtype), symbolic.pieces)
        wanted.append((recipe, layout, Destination(name, 64, 64, tensor.dtype, direct=True)))
    plan = join(catalog, wanted)
    assert len(plan.reads) == 1
    assert plan.reads[0].direct
    assert plan.read_bytes == 4 * 64 * 4


def test_half_of_the_columns_costs_half_of_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.arange(512 * 2048, dtype=torch.float32).view(512, 2048)}, path)
    symbolic = SymbolicTensor.of("w", (512, 2048), torch.float32)[:, 512:1536]
    layout = flat_partition((512, 1024), 1, 2)
    destination = Destination("w", layout.numel, layout.owned, torch.float32, direct=True)
    plan = join(
        open_catalog(path),
        [(Recipe(Target("w", (512, 1024), torch.float32), symbolic.pieces), layout, destination)],
    )
    assert plan.read_bytes == 256 * 1024 * 4
