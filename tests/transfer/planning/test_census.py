"""Counts of all ranks at once, compared with plans of each rank."""

from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.hypothesis_settings import count_examples
from zerostart.checkpoint.source import open_catalog
from zerostart.geometry.layout import Layout, dimension_shard, flat_partition, packed_section, replicated
from zerostart.recipe import Recipe, SymbolicTensor, Target
from zerostart.transfer.planning import Count, Destination, PlanOptions, Share, census, count_reads, join
from zerostart.transfer.planning.plan import find_starts

LAYERS = 3
THREADS = 2


def _conversions(symbols: dict[str, SymbolicTensor], experts: int) -> dict[str, SymbolicTensor]:
    """Return fused experts, a stored matrix, a transposed one and a computed one for each layer."""
    result = {}
    for layer in range(LAYERS):
        stacks = [torch.stack([symbols[f"{layer}.{k}.{i}"] for i in range(experts)]) for k in "ab"]
        result[f"{layer}.fused"] = torch.cat(stacks, 1)
        result[f"{layer}.plain"] = symbols[f"{layer}.plain"]
        result[f"{layer}.turned"] = symbols[f"{layer}.other"].t()
        result[f"{layer}.scaled"] = symbols[f"{layer}.plain"] * 2
    return result


@settings(max_examples=count_examples(40, 1500))
@given(data=st.data(), world=st.integers(1, 9), direct=st.booleans())
def test_counts_equal_the_plans(tmp_path: Path, data: st.DataObject, world: int, direct: bool) -> None:
    experts, rows, columns = (data.draw(st.integers(1, n)) for n in (5, 7, 9))
    stored = {"buffer": torch.zeros(rows)}
    # Layers in different orders, so that merges differ between layers.
    for layer in data.draw(st.permutations(range(LAYERS))):
        layer_tensors = {f"{kind}.{i}": torch.zeros(rows, columns) for kind in "ab" for i in range(experts)}
        layer_tensors |= {
            "plain": torch.zeros(rows * 3, columns),
            "other": torch.zeros(columns, rows),
            "small": torch.zeros(data.draw(st.integers(0, 40)), dtype=torch.uint8),
        }
        stored |= {f"{layer}.{name}": tensor for name, tensor in layer_tensors.items()}
    path = tmp_path / "model.safetensors"
    save_file(stored, path)
    catalog = open_catalog(path)
    symbols = {n: SymbolicTensor.of(n, tuple(t.shape), t.dtype) for n, t in stored.items()}
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    options = PlanOptions(chunk_size=data.draw(st.sampled_from([32, 100, 4096])))
    recipes = [
        Recipe(Target(name, tuple(tensor.shape), dtype), tensor.pieces)
        for name, tensor in _conversions(symbols, experts).items()
    ]
    across = data.draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    packs, dim = data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([0, 1]))
    flat = data.draw(st.booleans())

    def window(shape: tuple[int, ...], rank: int) -> Layout:
        parts = (shape[dim] // packs, shape[dim] - shape[dim] // packs) if packs == 2 else (shape[dim],)
        section = packed_section(shape, dim, parts, rank % across, across)
        shard = flat_partition if flat else partial(dimension_shard, dim=dim)
        return section.expand(shard(section.shape, rank=rank // across, world_size=world // across))

    whole = Recipe(Target("buffer", (rows,), dtype), symbols["buffer"].pieces)
    alike = {r.target.shape: [(n, window(r.target.shape, n)) for n in range(world)] for r in recipes}
    shares = [Share(whole, [(n, replicated((rows,))) for n in range(world)], direct)]
    shares += [Share(recipe, alike[recipe.target.shape], direct) for recipe in recipes]
    # A forecast asks only for some ranks.
    ranks = data.draw(st.lists(st.integers(0, world - 1), min_size=1, unique=True).map(sorted))
    own = {id(s.layouts): [s.layouts[rank] for rank in ranks if s.layouts[rank][1].boxes] for s in shares}
    some_shares = [Share(s.recipe, own[id(s.layouts)], direct) for s in shares]
    with patch.object(census, "RANKS", data.draw(st.sampled_from([1, 2, 64]))):
        counts = count_reads(catalog, some_shares, ranks, options, THREADS)
    for rank, count in zip(ranks, counts, strict=True):
        expected = []
        for share in shares:
            layout = share.layouts[rank][1]
            destination = Destination(share.recipe.target.name, layout.numel, layout.owned, dtype, direct)
            expected.append((share.recipe, layout, destination))
        plan = join(catalog, expected, options)
        reads = [*plan.all_reads()]
        scratch = sum(sorted((c.nbytes for c in plan.computations), reverse=True)[:THREADS])
        assert count == Count(plan.read_bytes, len(reads), any(not read.direct for read in reads), scratch)


@pytest.mark.parametrize(("gap", "reads"), [(0, 1), (40, 1), (41, 2)])
def test_a_small_gap_is_read_through_where_a_buffer_takes_it(gap: int, reads: int) -> None:
    actual = [(0, 0, 1000, False, 1), (0, 1000 + gap, 1000, False, 1)]
    assert len([*find_starts(actual, PlanOptions(4096, gap_share=0.04, gap_floor=512))]) == reads
    direct = [(*segment[:3], True, 1) for segment in actual]
    assert len([*find_starts(direct, PlanOptions(4096))]) == (1 if gap == 0 else 2)
