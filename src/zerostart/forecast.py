"""What a load will read and hold, rank by rank, before it runs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from zerostart.checkpoint.catalog import Catalog
from zerostart.engines.planned import DEVICE, HOST, Planned
from zerostart.engines.room import Tier
from zerostart.layout import replicated
from zerostart.models import Settled
from zerostart.planning import (
    Count,
    Destination,
    PlanOptions,
    Runs,
    Share,
    Sharing,
    count_reads,
    join,
    runs_of,
)
from zerostart.recipe import Coverage, Recipe, Recipes
from zerostart.transfer import Tuning
from zerostart.world import default_device

__all__ = ["RankForecast", "WorldPlan", "forecast_ranks"]


@dataclass(frozen=True)
class RankForecast:
    """One rank: bytes and number of its reads, bytes of its shards on the device, and its host peak.

    Where the device is the CPU the shards are part of the host peak.
    """

    rank: int
    read_bytes: int
    read_ops: int
    device_bytes: int
    peak_host_bytes: int


@dataclass(frozen=True)
class WorldPlan:
    """The plans of all ranks, summed up.

    ``sharing`` is there if the ranks have a choice between own slices and reading once; ``exchanged_bytes``
    are those that each of ``ranks`` gets from others, empty where all read their own. ``tier`` says where
    parameters that are whole on every rank would lie on machines like this one.
    """

    engine: str
    world_size: int
    ranks: tuple[RankForecast, ...]
    checkpoint_bytes: int
    parameters: int
    largest_tensor_bytes: int
    planning_seconds: float
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    computed: tuple[str, ...] = ()
    computed_whole: tuple[str, ...] = ()
    sharing: Sharing | None = None
    exchanged_bytes: tuple[int, ...] = ()
    tier: Tier | None = None

    @classmethod
    def of(
        cls,
        catalog: Catalog,
        recipes: Recipes,
        coverage: Coverage,
        engine: str,
        world_size: int,
        ranks: Sequence[RankForecast],
        seconds: float,
    ) -> WorldPlan:
        """Sum up a catalog and the ranks' forecasts."""
        return cls(
            engine=engine,
            world_size=world_size,
            ranks=tuple(ranks),
            checkpoint_bytes=catalog.nbytes,
            parameters=sum(entry.numel for entry in catalog.tensors.values()),
            largest_tensor_bytes=max((e.nbytes for e in catalog.tensors.values()), default=0),
            planning_seconds=seconds,
            missing=coverage.missing,
            unexpected=coverage.unexpected,
            computed=recipes.computed,
            computed_whole=recipes.computed_whole,
        )

    def as_dict(self) -> dict[str, Any]:
        """The contract's JSON form."""
        return asdict(self)


@dataclass(frozen=True)
class Owned:
    """A parameter's share on every rank in question: its runs, and the elements of its local storage."""

    runs: Runs
    numels: npt.NDArray[np.int64]


def forecast_ranks(
    catalog: Catalog,
    model: nn.Module,
    settled: Settled,
    placed: Planned,
    ranks: Sequence[int],
    tuning: Tuning,
) -> list[RankForecast]:
    """What each of ``ranks`` reads and holds; replicas read the same."""
    options, threads = PlanOptions(tuning.chunk_size), tuning.threads
    on_host = default_device().type == "cpu"
    twins = {rank: placed.twin(rank) for rank in ranks}
    shown = sorted(set(twins.values()))
    shares = [Share(r, _all_of(r, shown), on_host) for r in settled.buffers.values()]
    device = np.full(len(shown), sum(b.numel() * b.dtype.itemsize for b in model.buffers()), np.int64)
    device += placed.held or 0
    host = np.zeros(len(shown), np.int64)
    # Layers repeat: parameters that are cut alike and have one shape lie alike.
    owned: dict[Hashable, Owned] = {}
    for name, parameter in model.named_parameters():
        alike = (tuple(parameter.shape), placed.alike(name))
        if alike not in owned:
            layouts = [(r, placed.layout(name, r)) for r in shown]
            owned[alike] = Owned(runs_of(layouts), np.array([lay.numel for _, lay in layouts], np.int64))
        nbytes = owned[alike].numels * parameter.dtype.itemsize * (placed.held is None)
        home = placed.homes[name]
        device += nbytes if home == DEVICE else 0
        host += nbytes if home == HOST else 0
        recipe = settled.parameters[name]
        if isinstance(recipe, Recipe):
            shares.append(Share(recipe, owned[alike].runs, on_host or home != DEVICE))
    found = {
        rank: RankForecast(
            rank=rank,
            read_bytes=count.nbytes,
            read_ops=count.reads,
            device_bytes=held,
            peak_host_bytes=(tuning.ring_bytes if count.staged else 0)
            + count.scratch
            + aside
            + (held if on_host else 0),
        )
        for rank, count, held, aside in zip(
            shown,
            _counts(catalog, shares, placed, shown, options, threads),
            device.tolist(),
            host.tolist(),
            strict=True,
        )
    }
    return [replace(found[twin], rank=rank) for rank, twin in twins.items()]


def _all_of(recipe: Recipe, ranks: Sequence[int]) -> Runs:
    numel = prod(recipe.target.shape)
    return np.array([(0, numel, rank, 0) for rank in ranks if numel], np.int64).reshape(-1, 4).T


def _counts(
    catalog: Catalog,
    shares: Sequence[Share],
    placed: Planned,
    ranks: Sequence[int],
    options: PlanOptions,
    threads: int,
) -> list[Count]:
    """All ranks' reads at once where that can be; else, and for one rank alone, by planning."""
    if len(ranks) > 1:
        counts = count_reads(catalog, shares, ranks[-1] + 1, options)
        if counts is not None:
            return [counts[rank] for rank in ranks]
    return [_planned(catalog, shares, placed, rank, options, threads) for rank in ranks]


def _planned(
    catalog: Catalog,
    shares: Sequence[Share],
    placed: Planned,
    rank: int,
    options: PlanOptions,
    threads: int,
) -> Count:
    """One rank's reads, by planning them."""
    wanted = []
    for share in shares:
        target = share.recipe.target
        layout = replicated(target.shape) if target.buffer else placed.layout(target.name, rank)
        destination = Destination(target.name, layout.numel, layout.owned, target.dtype, share.direct)
        wanted.append((share.recipe, layout, destination))
    plan = join(catalog, wanted, options)
    reads = sum(1 for _ in plan.all_reads())
    return Count(plan.read_bytes, reads, plan.staged, plan.scratch_bytes(threads))
