"""The plan of a job, made by one process: see ``zerostart.plan``."""

from __future__ import annotations

from dataclasses import replace

from zerostart import engines
from zerostart.forecast import WorldPlan, forecast_ranks
from zerostart.foreseen import RANKS_OF_A_MACHINE, Foreseen
from zerostart.preparing import prepare, undisturbed
from zerostart.reporting import Clock
from zerostart.request import Request
from zerostart.world import World, default_device

__all__ = ["forecast"]


def forecast(request: Request, world_size: int, rank: int | None = None) -> WorldPlan:
    """The plan of every rank, or of one, without a process group; see ``zerostart.plan``."""
    with undisturbed():
        return _forecast(request, world_size, rank)


def _forecast(request: Request, world_size: int, rank: int | None) -> WorldPlan:
    clock = Clock()
    request.check()
    mesh = request.mesh(world_size, rank)
    known = prepare(request, World(0, 1, None), mesh, clock, strict=False)
    here = min(world_size, RANKS_OF_A_MACHINE)
    tuning = request.tuning(known.catalog, default_device(), bool(known.recipes.computed), here)
    of = range(world_size) if rank is None else [rank]
    catalog, model, settled = known.catalog, known.built.model, known.settled
    placed = engines.planned(
        request.engine,
        request.engine_config,
        model,
        known.parallelism,
        request.zero_stage,
        request.exchange,
    )
    ranks = forecast_ranks(catalog, model, settled, placed, of, tuning)
    made = WorldPlan.of(catalog, known.recipes, known.coverage, request.engine, world_size, ranks, 0.0)
    made = Foreseen(catalog, settled, placed, tuning).exchanged(made, request.forced_exchange)
    return replace(made, planning_seconds=clock.stop()["total"])
