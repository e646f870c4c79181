"""Load a model. Read ``_Load.load`` first: catalog, model, recipes, shards, plan, transfer."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from zerostart.checkpoint.source import WeightFiles, check_unchanged
from zerostart.distributed.machine import seconds_since_start
from zerostart.distributed.world import World, joined_world
from zerostart.engines import Placements, Residence, ShardMaker
from zerostart.live.model import LoadRecord, remember_load
from zerostart.live.report import Clock, Report
from zerostart.loading.destinations import Destinations
from zerostart.loading.masters import find_masters
from zerostart.loading.preparation import Prepared, check_agreement, isolated, prepare
from zerostart.loading.request import Request
from zerostart.loading.source import name_source
from zerostart.models import Program
from zerostart.recipe import Recipe
from zerostart.transfer import PeakMeter, Tuning
from zerostart.transfer.buffers import release_locked
from zerostart.transfer.collective import TransferStats, agree_on_strategy
from zerostart.transfer.planning import join
from zerostart.upstream.torch.optimizer_steps import watch_model
from zerostart.upstream.torch.tensors import bypass_interception


def run(request: Request, then: Callable[[nn.Module], None] | None = None) -> nn.Module:
    """Load a model, and call ``then`` with it; collective. See ``zerostart.load``."""
    with isolated():
        world = joined_world(request.device)
        # Inner phases report a rank's error early; this one covers the code between and after them.
        with world.phase("loading"):
            model = _Load(world).load(request)
            if then is not None:
                then(model)
        release_locked()
        return model


class _Load:
    """One load on the ranks of ``world``."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.started = seconds_since_start()
        self.clock = Clock()

    def load(self, request: Request) -> nn.Module:
        world, clock = self.world, self.clock
        with PeakMeter(request.device) as self.meter:
            with world.phase("arguments"):
                with clock.phase("build"):
                    request = request.with_engine()
                    engine = request.resolve(world.size)
                    with self.meter.paused():
                        engine.import_library()
                with clock.phase("compile"), self.meter.paused():
                    engine.compile_operations()
            # 1. Prepare catalog, model on meta, recipes, and the origin of each tensor. All ranks get the
            # same; nothing is sharded yet.
            prepared = prepare(request, engine, world, clock, request.strict, self.meter.paused, fetch=True)
            try:
                with clock.phase("plan"):
                    check_agreement(request, prepared, world)
                # 2. Allocate the shards.
                placements, destinations, maker, residence = self._shard(prepared)
            except BaseException:
                prepared.restore_model()
                raise
            tuning = request.tuning(engine, prepared.catalog, maker.device, bool(prepared.recipes.computed))
            # 3. Plan and read.
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
        """Give the model with its filled shards to the engine; collective."""
        model, engine, library = prepared.built.model, prepared.engine, prepared.built.library
        # The order matters: `finish` replaces parameters, then aliases (references outside the registries of
        # modules) are updated. Hooks of `preserve_calls` come after those of sequence parallelism.
        if gathered := maker.finish(model):
            how = f"{stats.how}; each rank a share of the flat buffers, then gathered from all"
            stats = replace(stats, received=stats.received + gathered, how=how)
        prepared.aliases.join(list(prepared.recipes.by_name))
        prepared.aliases.follow(model)
        engine.follow_aliases(model, prepared.aliases.entries)
        engine.enable_sequence_parallel(model)
        with bypass_interception():
            engine.preserve_calls(model, library.entries(model))
        library.keep_outputs(model)
        self._offer_masters(request, prepared, destinations, tuning)
        if prepared.from_checkpoint:
            _finish(request, prepared)
        return stats

    def _shard(self, prepared: Prepared) -> tuple[Placements, Destinations, ShardMaker, Residence | None]:
        """Allocate this rank's empty shards."""
        engine, model, dtype = prepared.engine, prepared.built.model, prepared.built.dtype
        names = list(prepared.origins.parameters)
        # Torch functions may be intercepted, to follow the user's edits of a model that was loaded before.
        # This load is no such edit, so it bypasses that.
        with self.clock.phase("build"), self.world.phase("sharding the model"), bypass_interception():
            placements = engine.placements(model, prepared.parallelism)
            maker = engine.shard_maker(self.world, dtype, prepared.parallelism, placements)
            # In this order: the agreement may change the maker's device.
            residence = maker.agree_on_residence(model, names)
            shards = maker.shard(model, names)
            destinations = Destinations.of(model, prepared.origins, shards, maker.device)
        return placements, destinations, maker, residence

    def _fill(
        self, request: Request, prepared: Prepared, destinations: Destinations, tuning: Tuning
    ) -> TransferStats:
        """Plan the reads, agree on a read strategy with the other ranks, and read."""
        world, clock = self.world, self.clock
        with clock.phase("plan"):
            # Not in a phase of `world`: `agree_on_strategy` is itself collective.
            requests, storage = destinations.requests(), prepared.catalog.storage
            exchange = request.exchange_of_reads(prepared.engine)
            strategy = agree_on_strategy(requests, storage, tuning, exchange, world)
            if strategy is not None and strategy.exchange:
                # All ranks of an exchange send requests of one size.
                tuning = replace(tuning, chunk_size=strategy.chunk_size)
        with clock.phase("plan"), world.phase("planning"):
            groups = None if strategy is None else strategy.groups
            plan = join(prepared.catalog, requests, tuning.options(), groups)
        with clock.phase("read"), world.phase("reading"):
            stats = destinations.read(plan, tuning, strategy, request.progress and world.rank == 0, world)
            if world.rank == 0:
                # Other ranks check only the files that they opened, to spare the file system.
                check_unchanged(prepared.catalog)
        with clock.phase("read"), world.phase("initialising"):
            destinations.initialise_missing(world)
        return stats

    def _offer_masters(
        self, request: Request, prepared: Prepared, destinations: Destinations, tuning: Tuning
    ) -> None:
        """Let the engine read fp32 masters of parameters that the model's dtype rounds."""
        shards = destinations.shards if request.fp32_masters and prepared.from_checkpoint else []
        masters = find_masters(prepared.catalog, prepared.origins.parameters, shards, tuning)
        prepared.engine.offer_masters(prepared.built.model, *masters)

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
            start_seconds=self.started,
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
        # The record lives as long as the model, and must not keep a mapping's tensors alive.
        catalog = replace(catalog, storage=catalog.storage.detach())
        read = {n: r for n, r in prepared.origins.parameters.items() if isinstance(r, Recipe)}
        # Values of a module or an initialiser cannot be read again.
        recipes = {**read, **prepared.origins.buffers} if prepared.from_checkpoint else {}
        return LoadRecord(catalog, recipes, prepared.engine, prepared.parallelism, placements, report)


def _finish(request: Request, prepared: Prepared) -> None:
    """Finish the model as its library's own loading does."""
    built, catalog = prepared.built, prepared.catalog
    built.model.eval()
    named = isinstance(request.source, (str, os.PathLike, WeightFiles))
    name = name_source(request.source, catalog) if named else None
    built.library.finish(built, prepared.recipes, name, catalog)
