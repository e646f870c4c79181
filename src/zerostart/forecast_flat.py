"""The forecast for ZeRO stages 1 and 2: whole parameters in flat buffers, read by all ranks or exchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from zerostart.checkpoint.catalog import Catalog
from zerostart.engines.deepspeed.flat import capacity, exchanges, flat_groups
from zerostart.forecast import RankForecast
from zerostart.layout import Layout, replicated
from zerostart.layout.flat import FlatRules, flat_run, shares
from zerostart.models import Settled
from zerostart.planning import Count, Destination, PlanOptions, Share, count_reads, join, runs_of
from zerostart.recipe import Recipe
from zerostart.transfer import Tuning
from zerostart.world import default_device

__all__ = ["forecast_flat"]

#: What a rank reads of each parameter and buffer that is read.
Wanted = Mapping[str, tuple[Recipe, Layout]]


def forecast_flat(
    catalog: Catalog,
    model: nn.Module,
    settled: Settled,
    rules: FlatRules,
    exchange: bool | None,
    ranks: Sequence[int],
    tuning: Tuning,
) -> list[RankForecast]:
    """What each of ``ranks`` reads and holds."""
    options, threads = PlanOptions(tuning.chunk_size), tuning.threads
    on_host = default_device().type == "cpu"
    groups = flat_groups(dict(model.named_parameters()), rules)
    held = sum(b.numel() * b.dtype.itemsize for b in model.buffers())
    for dtype, (_, group) in groups.items():
        held += capacity(group, rules.partitions, dtype.itemsize) * dtype.itemsize
    recipes = {name: r for name, r in settled.parameters.items() if isinstance(r, Recipe)}
    alike = {n: (r, replicated(r.target.shape)) for n, r in {**recipes, **settled.buffers}.items()}
    if exchanges(exchange, rules.partitions):
        wanted = {rank: dict(alike) for rank in ranks}
        for names, group in groups.values():
            share = group.numel // rules.partitions
            for rank, mine in wanted.items():
                runs = shares(group, rank * share, (rank + 1) * share)
                for name, run in zip(names, runs, strict=True):
                    if name in recipes:
                        mine[name] = (recipes[name], flat_run(recipes[name].target.shape, *run))
        counts = _counts(catalog, wanted, rules.partitions, on_host, options, threads)
    else:
        counts = [_planned(catalog, alike, on_host, options, threads)] * len(ranks)
    return [
        RankForecast(
            rank=rank,
            read_bytes=count.nbytes,
            read_ops=count.reads,
            device_bytes=held,
            peak_host_bytes=(tuning.ring_bytes if count.staged else 0)
            + count.scratch
            + (held if on_host else 0),
        )
        for rank, count in zip(ranks, counts, strict=True)
    ]


def _counts(
    catalog: Catalog,
    wanted: Mapping[int, Wanted],
    world_size: int,
    on_host: bool,
    options: PlanOptions,
    threads: int,
) -> list[Count]:
    """All ranks' reads at once where that can be; else, and for one rank alone, by planning."""
    if len(wanted) > 1:
        names = next(iter(wanted.values()))
        together = [
            Share(recipe, runs_of((rank, mine[name][1]) for rank, mine in wanted.items()), on_host)
            for name, (recipe, _) in names.items()
        ]
        counted = count_reads(catalog, together, world_size, options)
        if counted is not None:
            return [counted[rank] for rank in wanted]
    return [_planned(catalog, mine, on_host, options, threads) for mine in wanted.values()]


def _planned(catalog: Catalog, wanted: Wanted, on_host: bool, options: PlanOptions, threads: int) -> Count:
    """One rank's reads, by planning them."""
    items = []
    for recipe, layout in wanted.values():
        target = recipe.target
        destination = Destination(target.name, layout.numel, layout.owned, target.dtype, on_host)
        items.append((recipe, layout, destination))
    plan = join(catalog, items, options)
    reads = sum(1 for _ in plan.all_reads())
    return Count(plan.read_bytes, reads, plan.staged, plan.scratch_bytes(threads))
