"""The way of a load: catalog, model, recipes, shards, plan, transfer. Read from the top.

A rehearsal is the same way with another end: one process plays a rank, and nothing is handed over.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torch import nn

from zerostart.checkpoint.source import Files, check_unchanged
from zerostart.distributed.world import World, joined_world
from zerostart.engines import Engine, Placements, Residence, Shard, ShardMaker
from zerostart.errors import ConfigError
from zerostart.live.record import LoadRecord, keep
from zerostart.live.report import Clock, Report
from zerostart.loading.destinations import Destinations
from zerostart.loading.masters import masters_of
from zerostart.loading.preparation import Prepared, agree, prepare, undisturbed
from zerostart.loading.request import Request
from zerostart.loading.source import described
from zerostart.models import Program
from zerostart.recipe import Recipe
from zerostart.transfer import PeakMeter, Tuning
from zerostart.transfer.buffers import release_locked
from zerostart.transfer.collective import ReadDemand, TransferStats, agree_on_strategy
from zerostart.transfer.planning import PlanOptions, join
from zerostart.upstream.torch.stepped import watch_model


def run(request: Request, then: Callable[[nn.Module], None] | None = None) -> nn.Module:
    """Load, collectively; see ``zerostart.load``. ``then`` is called with the model as the last of it."""
    with undisturbed():
        world = joined_world(request.device)
        model = _Load(request, world, world, then).through()[0]
        release_locked()
        return model


def rehearse(request: Request, world_size: int, rank: int) -> tuple[Report, list[Shard]]:
    """Do what ``rank`` of ``world_size`` does in a load of ``request``, without the other ranks.

    What a rank of a big job will read, hold and wait for can be tried on one machine before the job has any
    others. There is no engine here: the shards are those that the engine's layout gives the rank, filled;
    what the engine would keep in files is in host memory. Buffers are loaded whole, as on every rank; what
    the checkpoint lacks is initialised. Returns the rank's report and its shards. Raises what
    ``zerostart.load`` raises, and ConfigError for a rank that is not there.
    """
    with undisturbed():
        _, record, shards = _Load(request, World(0, 1, None), World(rank, world_size, None)).through()
    return record.report, shards


@dataclass
class _Load:
    """One load. ``world`` are the ranks that agree; ``place`` is the rank that is loaded, and of how many."""

    request: Request
    world: World
    place: World
    then: Callable[[nn.Module], None] | None = None

    def __post_init__(self) -> None:
        self.clock = Clock()

    @property
    def played(self) -> bool:
        """Whether this process plays a rank of a job whose other ranks are not there."""
        return self.world is not self.place

    def through(self) -> tuple[nn.Module, LoadRecord, list[Shard]]:
        """All of it: the model, its record, and this rank's shards."""
        request, world, clock = self.request, self.world, self.clock
        # Phases inside tell a rank's error early; this one has what lies between them, and the end.
        with world.phase("loading"):
            with PeakMeter(request.device) as meter:
                with clock.phase("build"), world.phase("arguments"):
                    engine = self._engine(meter)
                taking = not self.played
                known = prepare(request, engine, world, clock, request.strict, meter.paused, taking)
                with _kept_on_failure(known):
                    with clock.phase("plan"):
                        agree(request, known, world)
                    placements, shards, destinations, maker, residence = self._shard(known)
                tuning = request.tuning(engine, known.catalog, maker.device, bool(known.recipes.computed))
                moved = self._fill(known, destinations, tuning)
                if not self.played:
                    with clock.phase("build"):
                        moved = _gathered(moved, maker.finish(known.built.model))
                        _keep_aliases(known)
                        known.engine.enable_sequence_parallel(known.built.model)
                        _keep_calls(known)
                        self._offer_masters(known, destinations, tuning)
                        if known.stored:
                            _finish(request, known)
            report = replace(self._report(known, moved, meter), tier=residence)
            record = self._record(known, placements, report)
            keep(known.built.model, record)
            if not self.played:
                watch_model(known.built.model)
            if self.then is not None:
                self.then(known.built.model)
        return known.built.model, record, shards

    def _engine(self, meter: PeakMeter) -> Engine:
        request = self.request
        engine = request.resolve(self.place.size, self.place.rank if self.played else None)
        if self.played and request.exchange and not engine.replicates_parameters:
            raise ConfigError("exchange=True needs all ranks, and a rehearsal has one; leave it out")
        if not self.played:
            with meter.paused():
                engine.require()
        return engine

    def _shard(
        self, known: Prepared
    ) -> tuple[Placements, list[Shard], Destinations, ShardMaker, Residence | None]:
        """Empty shards, made by the engine; played, memory as they would have."""
        engine, model, parallelism = known.engine, known.built.model, known.parallelism
        names = list(known.origins.parameters)
        with self.clock.phase("build"), self.world.phase("sharding the model"):
            placements = engine.placements(model, parallelism)
            maker = (
                engine.rehearsal_maker(self.place, parallelism, placements)
                if self.played
                else engine.shard_maker(self.world, known.built.dtype, parallelism, placements)
            )
            residence = maker.agree_on_residence(model, names)
            shards = maker.shard(model, names)
            destinations = Destinations.of(model, known.origins, shards, maker.device)
        return placements, shards, destinations, maker, residence

    def _fill(self, known: Prepared, destinations: Destinations, tuning: Tuning) -> TransferStats:
        """Plan the reads, agree with the other ranks on who does them, and read."""
        world, clock, request = self.world, self.clock, self.request
        # In flat buffers an exchange that is asked for is the engine's: each rank wants a share alone.
        forced = None if known.engine.replicates_parameters and request.exchange else request.exchange
        with clock.phase("plan"), world.phase("planning"):
            wanted = destinations.wanted()
            plan = join(known.catalog, wanted, PlanOptions(tuning.chunk_size))
            own = ReadDemand.of(plan, tuning, forced)
        with clock.phase("plan"):
            strategy = agree_on_strategy(own, plan, world)
            if strategy is not None and strategy.once:
                with world.phase("planning"):
                    plan = join(known.catalog, wanted, PlanOptions(strategy.chunk_size))
        with clock.phase("read"), world.phase("reading"):
            shown = request.progress and world.rank == 0
            if known.values is None:
                moved = destinations.read(plan, tuning, strategy, shown, world)
            else:
                moved = known.values.through(
                    plan, lambda part: destinations.read(part, tuning, strategy, False, world)
                )
            if world.rank == 0:
                check_unchanged(known.catalog)  # those that it has not opened, too
        with clock.phase("read"), world.phase("initialising"):
            destinations.initialise_missing(world)
        return moved

    def _offer_masters(self, known: Prepared, destinations: Destinations, tuning: Tuning) -> None:
        """Leave with the parameters what an engine needs to make fp32 masters of what is stored."""
        rounded: list[str] = []
        masters = None
        if self.request.fp32_masters and known.stored:
            rounded, masters = masters_of(
                known.catalog, known.origins.parameters, destinations.shards, tuning
            )
        known.engine.offer_masters(known.built.model, rounded, masters)

    def _report(self, known: Prepared, moved: TransferStats, meter: PeakMeter) -> Report:
        origins, coverage, built = known.origins, known.coverage, known.built
        whole = (n for n, p in origins.parameters.items() if isinstance(p, Program) and p.whole)
        return Report(
            missing=coverage.missing,
            unexpected=coverage.unexpected,
            mismatched=tuple(coverage.mismatched),
            ignored=coverage.ignored,
            initialised=origins.initialised,
            initialised_whole=tuple(whole),
            converted=known.recipes.converted,
            computed=known.recipes.computed,
            computed_whole=known.recipes.computed_whole,
            dequantised="" if built.quantizer is None else built.library.quantisation(built.quantizer),
            phases=self.clock.stop(),
            read_bytes=moved.read,
            planned_bytes=moved.planned,
            exchanged_bytes=moved.received,
            reading=moved.how,
            peak_host_bytes=meter.host_bytes,
            peak_device_bytes=meter.device_bytes,
            rank=self.place.rank,
            world_size=self.place.size,
            engine=known.engine.name,
        )

    def _record(self, known: Prepared, placements: Placements, report: Report) -> LoadRecord:
        catalog = known.catalog
        catalog = replace(catalog, storage=catalog.storage.kept())
        read = {n: r for n, r in known.origins.parameters.items() if isinstance(r, Recipe)}
        recipes = {**read, **known.origins.buffers} if known.stored else {}
        return LoadRecord(catalog, recipes, known.engine, known.parallelism, placements, report)


@contextlib.contextmanager
def _kept_on_failure(known: Prepared) -> Iterator[None]:
    """What fails inside leaves a module that exists with its values."""
    try:
        yield
    except BaseException:
        if known.values is not None:
            known.values.give_back()
        raise


def _gathered(moved: TransferStats, nbytes: int) -> TransferStats:
    """With the bytes that the engine has got from other ranks besides."""
    if not nbytes:
        return moved
    how = f"{moved.how}; each rank a share of the flat buffers, gathered from all"
    return replace(moved, received=moved.received + nbytes, how=how)


def _keep_aliases(known: Prepared) -> None:
    """Let places that hold parameters and buffers a second time have what has been loaded, and keep to it."""
    model, aliases = known.built.model, known.aliases
    aliases.join(list(known.recipes.by_name))
    aliases.follow(model)
    known.engine.follow_aliases(model, aliases.kept)


def _keep_calls(known: Prepared) -> None:
    """Keep the engine's hooks and classes from changing what a call of the model means."""
    model, library = known.built.model, known.built.library
    known.engine.preserve_calls(model, library.entries(model))
    library.keep_outputs(model)


def _finish(request: Request, known: Prepared) -> None:
    """Leave a model as its library's own loading leaves it."""
    built, catalog = known.built, known.catalog
    built.model.eval()
    named = isinstance(request.source, (str, os.PathLike, Files))
    name = described(request.source, catalog) if named else None
    built.library.finish(built, known.recipes, name, catalog)
