"""What a load will read and hold, rank by rank, before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from zerostart.checkpoint.catalog import Catalog
from zerostart.engines import planned_layout
from zerostart.layout import replicated
from zerostart.models import Settled
from zerostart.planning import Count, Destination, PlanOptions, Share, count_reads, join
from zerostart.recipe import Coverage, Recipe
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
    """The plans of all ranks, summed up."""

    engine: str
    world_size: int
    ranks: tuple[RankForecast, ...]
    checkpoint_bytes: int
    parameters: int
    largest_tensor_bytes: int
    planning_seconds: float
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        catalog: Catalog,
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
        )

    def as_dict(self) -> dict[str, Any]:
        """The contract's JSON form."""
        return asdict(self)


def forecast_ranks(
    catalog: Catalog,
    model: nn.Module,
    settled: Settled,
    engine: str,
    world_size: int,
    options: PlanOptions,
    threads: int,
) -> list[RankForecast]:
    """What each rank of ``world_size`` reads and holds."""
    on_host = default_device().type == "cpu"
    device_bytes = sum(b.numel() * b.dtype.itemsize for b in model.buffers())
    shares = [Share(recipe, 0) for recipe in settled.buffers.values()]
    for name, parameter in model.named_parameters():
        # The storage has the same size on every rank.
        numel = planned_layout(engine, tuple(parameter.shape), 0, world_size).numel
        device_bytes += numel * parameter.dtype.itemsize
        recipe = settled.parameters[name]
        if isinstance(recipe, Recipe) and numel:
            shares.append(Share(recipe, numel))
    counts = count_reads(catalog, shares, world_size, on_host, options)
    if counts is None:
        counts = [
            _planned(catalog, shares, engine, r, world_size, on_host, options) for r in range(world_size)
        ]
    return [
        RankForecast(
            rank=rank,
            read_bytes=count.nbytes,
            read_ops=count.reads,
            device_bytes=device_bytes,
            peak_host_bytes=(threads * options.chunk_size if count.staged else 0)
            + (device_bytes if on_host else 0),
        )
        for rank, count in enumerate(counts)
    ]


def _planned(
    catalog: Catalog,
    shares: Sequence[Share],
    engine: str,
    rank: int,
    world_size: int,
    on_host: bool,
    options: PlanOptions,
) -> Count:
    """One rank's reads, by planning them: for recipes that are not made of unbroken runs."""
    wanted = []
    for share in shares:
        target = share.recipe.target
        sharded = share.numel > 0
        layout = (
            planned_layout(engine, target.shape, rank, world_size) if sharded else replicated(target.shape)
        )
        destination = Destination(target.name, layout.numel, layout.owned, target.dtype, on_host)
        wanted.append((share.recipe, layout, destination))
    plan = join(catalog, wanted, options)
    return Count(plan.read_bytes, len(plan.reads), plan.staged)
