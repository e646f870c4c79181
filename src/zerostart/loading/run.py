"""The way of a load: catalog, model, recipes, shards, plan, transfer. Begin at ``_Load.load_in_shards``.

A rehearsal goes the same way: one process does what a rank of another job does, and hands nothing over.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import nn

from zerostart.checkpoint.source import Files, check_unchanged
from zerostart.distributed.world import World, joined_world
from zerostart.engines import Engine, Placements, Residence, Shard, ShardMaker
from zerostart.errors import ConfigError
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
    """Load, collectively; see ``zerostart.load``. ``then`` is called with the model as the last of it."""
    # Everything below is collective: each rank comes to the same phases in the same order, or all raise.
    with undisturbed():
        world = joined_world(request.device)
        model = _Load(world, world).load_in_shards(request, then)[0]
        # Page-locked memory of the ring is of no use any more: a training takes its own.
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
        # Two worlds: this process agrees with itself alone, and stands for ``rank`` of the job.
        _, record, shards = _Rehearsal(World(0, 1, None), World(rank, world_size, None)).load_in_shards(
            request
        )
    return record.report, shards


class _Load:
    """One load: each rank of ``world`` gets its shards, and the engine the model.

    ``job`` has the rank whose shards are loaded, and the number of ranks; in a load these are the same
    ranks as ``world``, those that agree.
    """

    #: Whether the values of a module that exists may be moved into its shards.
    takes_values = True
    #: Whether a hub id that is not in the cache is fetched.
    fetches = True

    def __init__(self, world: World, job: World) -> None:
        self.world = world
        self.job = job
        self.clock = Clock()

    def load_in_shards(
        self, request: Request, then: Callable[[nn.Module], None] | None = None
    ) -> tuple[nn.Module, LoadRecord, list[Shard]]:
        """All of it: the model, its record, and this rank's shards."""
        world, clock = self.world, self.clock
        # Phases inside tell a rank's error early; this one has what lies between them, and the end.
        with world.phase("loading"):
            # Until the model is handed over: its peaks go into the report, which is made behind it.
            with PeakMeter(request.device) as self.meter:
                with clock.phase("build"), world.phase("arguments"):
                    request = request.with_engine()
                    engine = self.resolve_engine(request)
                # 1. Catalog, model on meta, recipes, origins: the same on every rank; no shard has memory.
                prepared = prepare(
                    request,
                    engine,
                    world,
                    clock,
                    request.strict,
                    self.meter.paused,
                    self.takes_values,
                    self.fetches,
                )
                # Up to the first read the caller's module can be had back; from then on its tensors are freed
                # as they go.
                with _values_returned_on_failure(prepared):
                    with clock.phase("plan"):
                        # 2. Whether it is the same: before anything is sharded, so that a difference costs
                        # nothing yet.
                        agree(request, prepared, world)
                    # From here on ranks hold memory of their own; each of the steps is collective.
                    placements, shards, destinations, maker, residence = self._shard(prepared)
                tuning = request.tuning(
                    engine, prepared.catalog, maker.device, bool(prepared.recipes.computed)
                )
                # 3. Planned, and read into place.
                stats = self._fill(request, prepared, destinations, tuning)
                with clock.phase("build"):
                    stats = self.hand_over(request, prepared, destinations, maker, tuning, stats)
            report = replace(
                self._report(prepared, stats), tier=residence, engine_reason=request.engine_reason
            )
            # Last of all, so that only a model whose load has come to its end is known as loaded: ``save``
            # and the others start from the record.
            record = self._record(prepared, placements, report)
            remember_load(prepared.built.model, record)
            self.watch(prepared.built.model)
            if then is not None:
                then(prepared.built.model)
        return prepared.built.model, record, shards

    def resolve_engine(self, request: Request) -> Engine:
        """The engine of the request, whose libraries are there. Raises ConfigError and EngineError."""
        engine = request.resolve(self.job.size)
        with self.meter.paused():
            engine.require()
        return engine

    def make_shard_maker(self, prepared: Prepared, placements: Placements) -> ShardMaker:
        """What makes this rank's empty shards."""
        engine, built = prepared.engine, prepared.built
        # DeepSpeed's layer over the process group begins here, and imports what it compiles its operators
        # with: no part of what the load takes.
        with self.meter.paused():
            return engine.shard_maker(self.world, built.dtype, prepared.parallelism, placements)

    def hand_over(
        self,
        request: Request,
        prepared: Prepared,
        destinations: Destinations,
        maker: ShardMaker,
        tuning: Tuning,
        stats: TransferStats,
    ) -> TransferStats:
        """Make the model the engine's, with its filled shards; collective."""
        model, engine = prepared.built.model, prepared.engine
        # The order matters: aliases follow the parameters that the engine's end of sharding has put in
        # place, and hooks of calls come after those of sequences, which they leave alone.
        stats = _with_gathered(stats, maker.finish(model))
        _keep_aliases(prepared)
        engine.enable_sequence_parallel(model)
        _keep_calls(prepared)
        # After the calls: what is left on the parameters is for the engine's start, which comes later.
        self._offer_masters(request, prepared, destinations, tuning)
        if prepared.from_checkpoint:
            _finish(request, prepared)
        return stats

    def watch(self, model: nn.Module) -> None:
        """Note the optimizer's steps from now on."""
        watch_model(model)

    def _shard(
        self, prepared: Prepared
    ) -> tuple[Placements, list[Shard], Destinations, ShardMaker, Residence | None]:
        """Empty shards."""
        model = prepared.built.model
        names = list(prepared.origins.parameters)
        with self.clock.phase("build"), self.world.phase("sharding the model"):
            placements = prepared.engine.placements(model, prepared.parallelism)
            maker = self.make_shard_maker(prepared, placements)
            # In this order on all ranks: where whole parameters lie, then their memory. Buffers follow the
            # maker's device, which the agreement may have changed.
            residence = maker.agree_on_residence(model, names)
            shards = maker.shard(model, names)
            destinations = Destinations.of(model, prepared.origins, shards, maker.device)
        return placements, shards, destinations, maker, residence

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
            if prepared.values is None:
                stats = destinations.read(plan, tuning, strategy, shown, world)
            else:
                stats = prepared.values.execute(
                    plan, lambda part: destinations.read(part, tuning, strategy, False, world)
                )
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
        """Leave with the parameters what an engine needs to make fp32 masters of what is stored."""
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
            rank=self.job.rank,
            world_size=self.job.size,
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


class _Rehearsal(_Load):
    """One process does what one rank of ``job`` does: it agrees with itself alone, and has no engine."""

    takes_values = False
    fetches = False

    def resolve_engine(self, request: Request) -> Engine:
        """The engine whose layout is followed; it need not be installed. Raises ConfigError, too."""
        engine = request.resolve(self.job.size, self.job.rank)
        if request.exchange and not engine.replicates_parameters:
            raise ConfigError("exchange=True needs all ranks, but a rehearsal runs one; leave it out")
        return engine

    def make_shard_maker(self, prepared: Prepared, placements: Placements) -> ShardMaker:
        """What makes plain memory as the rank of the job would have it."""
        return prepared.engine.rehearsal_maker(self.job, prepared.parallelism, placements)

    def hand_over(
        self,
        request: Request,
        prepared: Prepared,
        destinations: Destinations,
        maker: ShardMaker,
        tuning: Tuning,
        stats: TransferStats,
    ) -> TransferStats:
        """Nothing: the shards are looked at, and dropped."""
        return stats

    def watch(self, model: nn.Module) -> None:
        """Nothing: it takes no steps."""


@contextlib.contextmanager
def _values_returned_on_failure(prepared: Prepared) -> Iterator[None]:
    """Where something inside fails, a module that had values has them again."""
    try:
        yield
    except BaseException:
        if prepared.values is not None:
            prepared.values.give_back()
        raise


def _with_gathered(stats: TransferStats, nbytes: int) -> TransferStats:
    """``stats`` and the bytes that the engine has gathered from other ranks."""
    if not nbytes:
        return stats
    how = f"{stats.how}; each rank a share of the flat buffers, gathered from all"
    return replace(stats, received=stats.received + nbytes, how=how)


def _keep_aliases(prepared: Prepared) -> None:
    """Let places that hold parameters and buffers a second time have what has been loaded, and keep to it."""
    model, aliases = prepared.built.model, prepared.aliases
    aliases.join(list(prepared.recipes.by_name))
    aliases.follow(model)
    prepared.engine.follow_aliases(model, aliases.entries)


def _keep_calls(prepared: Prepared) -> None:
    """Keep the engine's hooks and classes from changing what a call of the model means."""
    model, library = prepared.built.model, prepared.built.library
    prepared.engine.preserve_calls(model, library.entries(model))
    library.keep_outputs(model)


def _finish(request: Request, prepared: Prepared) -> None:
    """Leave a model as its library's own loading leaves it."""
    built, catalog = prepared.built, prepared.catalog
    built.model.eval()
    named = isinstance(request.source, (str, os.PathLike, Files))
    name = described(request.source, catalog) if named else None
    built.library.finish(built, prepared.recipes, name, catalog)
