"""The plan of a job, made by one process: see ``zerostart.plan``."""

from __future__ import annotations

from dataclasses import replace

from zerostart.distributed.world import World, default_device
from zerostart.engines import RANKS_OF_A_MACHINE
from zerostart.loading.arguments import ForecastArguments
from zerostart.loading.forecast import Subject, WorldPlan, foresee
from zerostart.loading.preparation import prepare, undisturbed
from zerostart.loading.report import Clock
from zerostart.loading.request import Request


def forecast(
    request: Request, world_size: int, rank: int | None = None, asked: ForecastArguments | None = None
) -> WorldPlan:
    """The plan of every rank, or of one, without a process group; see ``zerostart.plan``."""
    with undisturbed():
        return _forecast(request, world_size, rank, asked or ForecastArguments())


def _forecast(request: Request, world_size: int, rank: int | None, asked: ForecastArguments) -> WorldPlan:
    clock = Clock()
    engine = request.resolve(world_size, rank)
    known = prepare(request, engine, World(0, 1, None), clock, strict=False)
    here = min(world_size, RANKS_OF_A_MACHINE)
    tuning = request.tuning(engine, known.catalog, default_device(), bool(known.recipes.computed), here)
    subject = Subject(known.catalog, known.built.model, known.recipes, known.coverage, known.origins)
    # In flat buffers an exchange that is asked for is the engine's: each rank wants a share alone.
    forced = None if engine.replicates_parameters and request.exchange else request.exchange
    of = range(world_size) if rank is None else [rank]
    made = foresee(subject, engine, of, tuning, asked, forced)
    return replace(made, planning_seconds=clock.stop()["total"])
