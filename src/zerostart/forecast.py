"""What a load will read and hold, rank by rank, before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from zerostart.checkpoint.catalog import Catalog
from zerostart.engines import planned_layout
from zerostart.layout import replicated
from zerostart.models import Program, Settled
from zerostart.planning import Destination, Plan, PlanOptions, join
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
    """Plan each rank of ``world_size`` and keep the sums."""
    on_host = default_device().type == "cpu"
    parameters = {name: (tuple(p.shape), p.dtype) for name, p in model.named_parameters()}
    fixed = sum(b.numel() * b.dtype.itemsize for b in model.buffers())
    forecasts = []
    for rank in range(world_size):
        wanted = []
        shards = 0
        for name, (shape, dtype) in parameters.items():
            layout = planned_layout(engine, shape, rank, world_size)
            shards += layout.numel * dtype.itemsize
            recipe = settled.parameters[name]
            if not isinstance(recipe, Program):
                wanted.append(
                    (recipe, layout, _destination(recipe, layout.numel, layout.owned, dtype, on_host))
                )
        for recipe in settled.buffers.values():
            layout = replicated(recipe.target.shape)
            dtype = recipe.target.dtype
            wanted.append((recipe, layout, _destination(recipe, layout.numel, layout.owned, dtype, on_host)))
        plan = join(catalog, wanted, options)
        forecasts.append(_summed(rank, plan, shards + fixed, on_host, threads))
    return forecasts


def _destination(recipe: Recipe, numel: int, owned: int, dtype: torch.dtype, on_host: bool) -> Destination:
    return Destination(recipe.target.name, numel, owned, dtype, on_host)


def _summed(rank: int, plan: Plan, device_bytes: int, on_host: bool, threads: int) -> RankForecast:
    staging = threads * plan.chunk_size if plan.staged else 0
    return RankForecast(
        rank=rank,
        read_bytes=plan.read_bytes,
        read_ops=len(plan.reads),
        device_bytes=device_bytes,
        peak_host_bytes=staging + (device_bytes if on_host else 0),
    )
