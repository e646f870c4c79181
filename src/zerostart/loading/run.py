"""The way of a load: catalog, model, recipes, shards, plan, transfer. Begin at ``_Load.load``."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from zerostart.checkpoint.source import Files, check_unchanged
from zerostart.distributed.world import World, joined_world
from zerostart.engines import Placements, Residence, ShardMaker
from zerostart.live.model import LoadRecord, remember_load
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
from zerostart.transfer.collective import TransferStats, agree_on_strategy
from zerostart.transfer.planning import join
from zerostart.upstream.torch.stepped import watch_model


def run(request: Request, then: Callable[[nn.Module], None] | None = None) -> nn.Module:
    """Load a model, collectively; call ``then`` with it at the end. See ``zerostart.load``."""
    # Everything below is collective: each rank comes to the same phases in the same order, or all raise.
    with undisturbed():
        world = joined_world(request.device)
        # Phases inside tell a rank's error early; this one has what lies between them, and the end.
        with world.phase("loading"):
            model = _Load(world).load(request)
            if then is not None:
                then(model)
        # Page-locked memory of the ring is of no use any more: a training takes its own.
        release_locked()
        return model


class _Load:
    """One load: each rank of ``world`` gets its shards, and the engine the model."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.clock = Clock()

    def load(self, request: Request) -> nn.Module:
        world, clock = self.world, self.clock
        # Until the model is handed over: the peaks of that time go into the report.
        with PeakMeter(request.device) as self.meter:
            with clock.phase("build"), world.phase("arguments"):
                request = request.with_engine()
                engine = request.resolve(world.size)
                with self.meter.paused():
                    engine.require()
            # 1. Catalog, model on meta, recipes, origins: the same on every rank; no shard has memory.
            prepared = prepare(request, engine, world, clock, request.strict, self.meter.paused, fetch=True)
            try:
                with clock.phase("plan"):
                    # 2. Compared before anything is sharded, so that a difference costs nothing yet.
                    agree(request, prepared, world)
                # From here on ranks hold memory of their own; each of the steps is collective.
                placements, destinations, maker, residence = self._shard(prepared)
            except BaseException:
                prepared.give_back()
                raise
            tuning = request.tuning(engine, prepared.catalog, maker.device, bool(prepared.recipes.computed))
            # 3. Planned, and read into place.
            stats = self._fill(request, prepared, destinations, tuning)
            with clock.phase("build"):
                stats = self._hand_over(request, prepared, destinations, maker, tuning, stats)
        model = prepared.built.model
        report = replace(self._report(prepared, stats), tier=residence, engine_reason=request.engine_reason)
        remember_load(model, self._record(prepared, placements, report))
        watch_model(model)
        return model

    def _hand_over(
        self,
        request: Request,
        prepared: Prepared,
        destinations: Destinations,
        maker: ShardMaker,
        tuning: Tuning,
        stats: TransferStats,
    ) -> TransferStats:
        """Make the model the engine's, with its filled shards; collective."""
        model, engine, library = prepared.built.model, prepared.engine, prepared.built.library
        # The order matters: aliases follow the parameters that the engine's end of sharding has put in
        # place, and hooks of calls come after those of sequences, which they leave alone.
        if gathered := maker.finish(model):
            how = f"{stats.how}; each rank a share of the flat buffers, gathered from all"
            stats = replace(stats, received=stats.received + gathered, how=how)
        prepared.aliases.join(list(prepared.recipes.by_name))
        prepared.aliases.follow(model)
        engine.follow_aliases(model, prepared.aliases.entries)
        engine.enable_sequence_parallel(model)
        engine.preserve_calls(model, library.entries(model))
        library.keep_outputs(model)
        # After the calls: what is left on the parameters is for the engine's start, which comes later.
        self._offer_masters(request, prepared, destinations, tuning)
        if prepared.from_checkpoint:
            _finish(request, prepared)
        return stats

    def _shard(self, prepared: Prepared) -> tuple[Placements, Destinations, ShardMaker, Residence | None]:
        """Make this rank's empty shards."""
        engine, model, dtype = prepared.engine, prepared.built.model, prepared.built.dtype
        names = list(prepared.origins.parameters)
        with self.clock.phase("build"), self.world.phase("sharding the model"):
            placements = engine.placements(model, prepared.parallelism)
            # Not measured: DeepSpeed imports here what it compiles its operators with.
            with self.meter.paused():
                maker = engine.shard_maker(self.world, dtype, prepared.parallelism, placements)
            # In this order on all ranks: where whole parameters lie, then their memory. Buffers follow the
            # maker's device, which the agreement may have changed.
            residence = maker.agree_on_residence(model, names)
            shards = maker.shard(model, names)
            destinations = Destinations.of(model, prepared.origins, shards, maker.device)
        return placements, destinations, maker, residence

    def _fill(
        self, request: Request, prepared: Prepared, destinations: Destinations, tuning: Tuning
    ) -> TransferStats:
        """Plan the reads, agree with the other ranks on who does them, and read."""
        world, clock = self.world, self.clock
        with clock.phase("plan"):
            # 1. Collective, outside of a phase: it is itself what ranks meet in.
            wanted, storage = destinations.wanted(), prepared.catalog.storage
            exchange = request.exchange_of_reads(prepared.engine)
            strategy = agree_on_strategy(wanted, storage, tuning, exchange, world)
            if strategy is not None and strategy.exchange:
                # Requests of one size on all ranks, which fit the buffers of an exchange.
                tuning = replace(tuning, chunk_size=strategy.chunk_size)
        with clock.phase("plan"), world.phase("planning"):
            # 2. Planned by each rank for itself.
            groups = None if strategy is None else strategy.groups
            plan = join(prepared.catalog, wanted, tuning.options(), groups)
        with clock.phase("read"), world.phase("reading"):
            shown = request.progress and world.rank == 0
            stats = destinations.read(plan, tuning, strategy, shown, world)
            if world.rank == 0:
                # Rank 0 alone: the others check what they have opened, and one of a thousand asking the file
                # system is enough.
                check_unchanged(prepared.catalog)  # those that it has not opened, too
        with clock.phase("read"), world.phase("initialising"):
            destinations.initialise_missing(world)
        return stats

    def _offer_masters(
        self, request: Request, prepared: Prepared, destinations: Destinations, tuning: Tuning
    ) -> None:
        rounded: list[str] = []
        masters = None
        if request.fp32_masters and prepared.from_checkpoint:
            rounded, masters = masters_of(
                prepared.catalog, prepared.origins.parameters, destinations.shards, tuning
            )
        prepared.engine.offer_masters(prepared.built.model, rounded, masters)

    def _report(self, prepared: Prepared, stats: TransferStats) -> Report:
        origins, coverage, built = prepared.origins, prepared.coverage, prepared.built
        whole = (n for n, p in origins.parameters.items() if isinstance(p, Program) and p.whole)
        return Report(
            missing=coverage.missing,
            unexpected=coverage.unexpected,
            mismatched=tuple(coverage.mismatched),
            reinitialised=prepared.reinitialised,
            ignored=coverage.ignored,
            initialised=origins.initialised,
            initialised_whole=tuple(whole),
            converted=prepared.recipes.converted,
            computed=prepared.recipes.computed,
            computed_whole=prepared.recipes.computed_whole,
            dequantised="" if built.quantizer is None else built.library.quantisation(built.quantizer),
            phases=self.clock.stop(),
            read_bytes=stats.read,
            planned_bytes=stats.planned,
            exchanged_bytes=stats.received,
            reading=stats.how,
            peak_host_bytes=self.meter.host_bytes,
            peak_device_bytes=self.meter.device_bytes,
            rank=self.world.rank,
            world_size=self.world.size,
            engine=prepared.engine.name,
        )

    def _record(self, prepared: Prepared, placements: Placements, report: Report) -> LoadRecord:
        catalog = prepared.catalog
        # A record lives as long as the model: of weights in memory it must not keep the tensors alive.
        catalog = replace(catalog, storage=catalog.storage.kept())
        read = {n: r for n, r in prepared.origins.parameters.items() if isinstance(r, Recipe)}
        # None where values came from a module or an initialiser: they cannot be read a second time.
        recipes = {**read, **prepared.origins.buffers} if prepared.from_checkpoint else {}
        return LoadRecord(catalog, recipes, prepared.engine, prepared.parallelism, placements, report)


def _finish(request: Request, prepared: Prepared) -> None:
    """Leave a model as its library's own loading leaves it."""
    built, catalog = prepared.built, prepared.catalog
    built.model.eval()
    named = isinstance(request.source, (str, os.PathLike, Files))
    name = described(request.source, catalog) if named else None
    built.library.finish(built, prepared.recipes, name, catalog)
