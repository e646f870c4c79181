"""Counting all ranks' reads at once against planning each rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from zerostart.checkpoint.source import open_catalog
from zerostart.layout import Layout, dimension_shard, flat_partition, packed, replicated
from zerostart.planning import Count, Destination, PlanOptions, Share, count_reads, join, runs_of
from zerostart.recipe import Recipe, SymbolicTensor, Target


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), world=st.integers(1, 9), direct=st.booleans(), flat=st.booleans())
def test_counts_equal_the_plans(
    tmp_path: Path, data: st.DataObject, world: int, direct: bool, flat: bool
) -> None:
    experts, rows, columns = (data.draw(st.integers(1, n)) for n in (5, 7, 9))
    stored = {f"{kind}.{i}": torch.zeros(rows, columns) for kind in "ab" for i in range(experts)}
    stored["plain"] = torch.zeros(rows * 3, columns)
    stored["buffer"] = torch.zeros(rows)
    path = tmp_path / "model.safetensors"
    save_file(stored, path)
    catalog = open_catalog(path)
    symbols = {n: SymbolicTensor.of(n, tuple(t.shape), t.dtype) for n, t in stored.items()}
    fused = torch.cat([torch.stack([symbols[f"{k}.{i}"] for i in range(experts)]) for k in "ab"], 1)
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    options = PlanOptions(chunk_size=data.draw(st.sampled_from([32, 100, 4096])))

    def recipe(name: str, tensor: torch.Tensor) -> Recipe:
        return Recipe(Target(name, tuple(tensor.shape), dtype), tensor.pieces)

    across = data.draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    packs = data.draw(st.sampled_from([1, 2]))

    def cut(shape: tuple[int, ...], rank: int) -> Layout:
        dim = 1 if len(shape) > 2 and packs == 2 else 0
        parts = (shape[dim] // packs, shape[dim] - shape[dim] // packs) if packs == 2 else (shape[dim],)
        section = packed(shape, dim, parts, rank % across, across)
        shard = flat_partition if flat else partial(dimension_shard, dim=0)
        return section.holds(shard(section.shape, rank=rank // across, world_size=world // across))

    sharded = [recipe("fused", fused), recipe("plain", symbols["plain"])]
    whole = recipe("buffer", symbols["buffer"])
    ranks = range(world)
    shares = [Share(whole, runs_of((r, replicated(whole.target.shape)) for r in ranks), direct)]
    shares += [Share(s, runs_of((r, cut(s.target.shape, r)) for r in ranks), direct) for s in sharded]
    counts = count_reads(catalog, shares, world, options)
    for rank in ranks:
        layouts = [
            (whole, replicated(whole.target.shape)),
            *((r, cut(r.target.shape, rank)) for r in sharded),
        ]
        plan = join(
            catalog,
            [(r, lay, Destination(r.target.name, lay.numel, lay.owned, dtype, direct)) for r, lay in layouts],
            options,
        )
        assert counts[rank] == Count(plan.read_bytes, len(plan.reads), plan.staged)


def test_a_transposed_recipe_is_left_to_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(4, 6)}, path)
    turned = SymbolicTensor.of("w", (4, 6), torch.float32).t()
    recipe = Recipe(Target("w", (6, 4), torch.float32), turned.pieces)
    runs = runs_of((rank, flat_partition((6, 4), rank, 2)) for rank in range(2))
    assert count_reads(open_catalog(path), [Share(recipe, runs, True)], 2, PlanOptions()) is None
