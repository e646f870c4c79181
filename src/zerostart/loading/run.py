"""The way of a load: catalog, model, recipes, shards, plan, transfer. Read from the top."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from zerostart import engines, models
from zerostart.checkpoint.states import check_unchanged
from zerostart.distributed.world import World, default_device, joined_world
from zerostart.engines import Residence
from zerostart.engines.deepspeed.flat import offer_runs
from zerostart.loading.destinations import Destinations
from zerostart.loading.masters import masters_of
from zerostart.loading.preparation import Prepared, prepare, undisturbed
from zerostart.loading.report import Clock, Report, keep
from zerostart.loading.request import Request
from zerostart.loading.source import described
from zerostart.models import Program
from zerostart.planning import PlanOptions, join
from zerostart.transfer import PeakMeter, Tuning
from zerostart.transfer.strategy import ReadDemand, TransferStats, agree_on_strategy

__all__ = ["reported", "run"]


def run(request: Request) -> nn.Module:
    """Load, collectively; see ``zerostart.load``."""
    clock = Clock()
    with undisturbed():
        return _load(request, clock)


def _load(request: Request, clock: Clock) -> nn.Module:
    world = joined_world()
    # Phases inside are where a rank's error is told early; this one has what lies between them, and the end.
    with world.phase("loading"):
        with PeakMeter(default_device()) as meter:
            with clock.phase("build"), world.phase("arguments"):
                request.check()
                mesh = request.mesh(world.size)
                with meter.paused():
                    engines.require(request.engine, request.zero_stage)
            known = prepare(request, world, mesh, clock, request.strict, meter.paused)
            moved, residence = _into_shards(request, known, world, clock)
        made = reported(known, request, (world.rank, world.size), clock, moved, meter)
        keep(known.built.model, replace(made, tier=residence))
    return known.built.model


def _into_shards(
    request: Request, known: Prepared, world: World, clock: Clock
) -> tuple[TransferStats, Residence | None]:
    """Shard the model, fill the shards, and leave the model as its engine and its library want it."""
    model, origins = known.built.model, known.origins
    names = list(origins.parameters)
    with clock.phase("build"), world.phase("sharding the model"):
        engine = engines.make_engine(
            request.engine,
            world,
            known.built.dtype,
            request.engine_config,
            known.parallelism,
            request.zero_stage,
            request.exchange,
        )
        residence = engines.agree_on_residence(engine, model, names)
        destinations = Destinations.of(model, origins, engine.shard(model, names), engine.device)
        tuning = request.tuning(known.catalog, engine.device, bool(known.recipes.computed))
    moved = _fill(request, known, destinations, tuning, world, clock)
    with clock.phase("build"):
        moved = _gathered(moved, engine.finish(model))
        _offer_masters(request, known, destinations, tuning)
        _finish(request, known)
    return moved, residence


def _fill(
    request: Request, known: Prepared, destinations: Destinations, tuning: Tuning, world: World, clock: Clock
) -> TransferStats:
    """Plan the reads, agree with the other ranks on who does them, and read."""
    with clock.phase("plan"), world.phase("planning"):
        wanted = destinations.wanted()
        plan = join(known.catalog, wanted, PlanOptions(tuning.chunk_size))
        own = ReadDemand.of(plan, tuning, request.forced_exchange)
    with clock.phase("plan"):
        sharing = agree_on_strategy(own, plan, world)
        if sharing is not None and sharing.once:
            with world.phase("planning"):
                plan = join(known.catalog, wanted, PlanOptions(sharing.chunk_size))
    with clock.phase("read"), world.phase("reading"):
        shown = request.progress and world.rank == 0
        moved = destinations.read(plan, tuning, sharing, shown, world)
        if world.rank == 0 and known.catalog.memory is None:
            check_unchanged(known.catalog)  # those that it has not opened, too
    with clock.phase("read"), world.phase("initialising"):
        destinations.initialise_missing(world)
    return moved


def _gathered(moved: TransferStats, nbytes: int) -> TransferStats:
    """With the bytes that the engine has got from other ranks besides."""
    if not nbytes:
        return moved
    how = f"{moved.how}; each rank a share of the flat buffers, gathered from all"
    return replace(moved, received=moved.received + nbytes, how=how)


def reported(
    known: Prepared,
    request: Request,
    place: tuple[int, int],
    clock: Clock,
    moved: TransferStats,
    meter: PeakMeter,
) -> Report:
    """The report of the rank ``place`` (rank, world size)."""
    return Report(
        missing=known.coverage.missing,
        unexpected=known.coverage.unexpected,
        mismatched=tuple(known.coverage.mismatched),
        ignored=known.coverage.ignored,
        initialised=known.origins.initialised,
        initialised_whole=tuple(
            n for n, p in known.origins.parameters.items() if isinstance(p, Program) and p.whole
        ),
        converted=known.recipes.converted,
        computed=known.recipes.computed,
        computed_whole=known.recipes.computed_whole,
        phases=clock.stop(),
        read_bytes=moved.read,
        planned_bytes=moved.planned,
        exchanged_bytes=moved.received,
        reading=moved.how,
        peak_host_bytes=meter.host_bytes,
        peak_device_bytes=meter.device_bytes,
        rank=place[0],
        world_size=place[1],
        engine=request.engine,
        parallelism=known.parallelism,
    )


def _offer_masters(request: Request, known: Prepared, destinations: Destinations, tuning: Tuning) -> None:
    """Leave with the parameters what an engine needs to make fp32 masters of what the checkpoint stores."""
    rounded: list[str] = []
    masters = None
    if request.fp32_masters:
        rounded, masters = masters_of(
            known.catalog, request.source, known.origins.parameters, destinations.shards, tuning
        )
    model = known.built.model
    if not request.flat:
        engines.offer_masters(request.engine, model, rounded, masters.read if masters else None)
    elif masters is not None and request.zero_stage > 0:
        offer_runs(model, rounded, masters.read_runs)


def _finish(request: Request, known: Prepared) -> None:
    """Leave a model of transformers or diffusers as ``from_pretrained`` leaves it."""
    model: Any = known.built.model
    catalog = known.catalog
    model.eval()
    named = catalog.memory is None
    if models.is_pretrained(model):
        name = described(request.source, catalog) if named else model.config.name_or_path
        models.finish_pretrained(model, known.recipes, name, catalog.root, known.built.dtype)
    elif models.is_diffusers(model) and named and str(request.source) not in catalog.files:
        models.finish_diffusers(model, described(request.source, catalog))
