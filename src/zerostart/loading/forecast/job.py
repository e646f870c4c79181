"""The whole forecast: what is read, what is shares, how long it takes, and whether it fits."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from zerostart.checkpoint.catalog import Catalog
from zerostart.distributed.world import World, default_device
from zerostart.engines import RANKS_OF_A_MACHINE, Engine
from zerostart.engines.forecast import OptimizerCost, Target
from zerostart.errors import ZerostartError
from zerostart.live.report import Clock
from zerostart.loading.arguments import ForecastArguments
from zerostart.loading.forecast.memory import (
    moments_of,
    optimizer_of,
    parameter_bytes,
    parameter_bytes_alone,
    peaks,
)
from zerostart.loading.forecast.reading import Foreseen, counts_of, owned_by, rates_of, timed
from zerostart.loading.forecast.result import (
    Alternative,
    Fit,
    Limits,
    Memory,
    Prices,
    RankForecast,
    WorldPlan,
)
from zerostart.loading.preparation import prepare, undisturbed
from zerostart.loading.request import Request
from zerostart.models import Origins
from zerostart.recipe import Coverage, Recipes
from zerostart.transfer import Tuning
from zerostart.transfer.planning import Count, Rates


@dataclass(frozen=True)
class Subject:
    """What is loaded: all that is known of it before anything is sharded."""

    catalog: Catalog
    model: nn.Module
    recipes: Recipes
    coverage: Coverage
    origins: Origins


def foresee(
    subject: Subject,
    engine: Engine,
    ranks: Sequence[int],
    tuning: Tuning,
    asked: ForecastArguments,
    exchange: bool | None,
) -> WorldPlan:
    """The plan of ``ranks``; ``exchange``: whether bytes that several want must be read once.

    Raises ConfigError for arguments out of range, or an exchange that does not fit into the memory limit.
    """
    # All that may be refused first, from the arguments alone.
    limits = Limits.of(asked.device_memory, asked.host_memory, engine.mesh.world_size)
    rates = rates_of(tuning.rates, asked.storage_rate, asked.interconnect_rate, asked.network_rate)
    prices = Prices.of(asked.request_price, asked.gigabyte_price)
    optimizer = optimizer_of(asked.optimizer, engine.configured_optimizer)
    target = Target(limits.accelerator, engine.mesh.world_size)
    model, parallelism = subject.model, engine.parallelism(subject.model)
    placed = engine.placements(model, parallelism)
    # Ranks that hold alike are counted once, by the first of them.
    twins = {rank: placed.twin(rank) for rank in ranks}
    shown = sorted(set(twins.values()))
    owned = owned_by(model, placed, shown)
    shares = parameter_bytes(
        model, placed, parallelism, shown, {name: own.numels for name, own in owned.items()}
    )
    # One entry for each of ``shown``, as in all arrays that follow.
    counts = counts_of(subject.catalog, subject.origins, placed, owned, shown, tuning, not target.accelerator)
    staged = [(tuning.ring_bytes if count.staged else 0) + count.scratch for count in counts]
    moments = moments_of(model, engine, placed, shares, np.array(staged, np.int64), optimizer, target)
    memory = dict(zip(shown, peaks(moments, len(shown), target), strict=True))
    # ``0 * shares.trained`` makes an array of a number: one entry for each rank, as the others are.
    resident = (shares.device if placed.held is None else placed.held) + shares.buffers + 0 * shares.trained
    on_device = dict(zip(shown, resident.tolist(), strict=True))
    read = dict(zip(shown, counts, strict=True))
    store = subject.catalog.storage.cost is not None
    made = WorldPlan.of(
        subject.catalog,
        subject.recipes,
        subject.coverage,
        engine.name,
        engine.mesh.world_size,
        [_of_rank(rank, read[twin], on_device[twin], memory[twin], store) for rank, twin in twins.items()],
        0.0,
    )
    # Own slices first; whether bytes are read once instead changes reads and staging of what is made so far.
    foreseen = Foreseen(subject.catalog, subject.origins, placed, tuning, rates, not target.accelerator)
    made = foreseen.exchanged(made, exchange)
    fits = fits_of([rank.memory for rank in made.ranks], limits, made.world_size)
    advised: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    # Only then: each alternative is a forecast of its own.
    if not all(fit.fits for fit in fits):
        advised, alternatives = advice(model, engine, max(staged, default=0), optimizer, limits)
    storage = subject.catalog.storage
    stored = storage.nbytes if storage.cached else math.inf
    return replace(
        made,
        ranks=timed(made, stored, rates, storage.cost),
        zero_stage=engine.zero_stage,
        tier=placed.residence,
        optimizer=optimizer.name,
        accelerator=limits.accelerator,
        rates=_shown(rates, made.world_size),
        prices=prices,
        fits=fits,
        advice=advised,
        alternatives=alternatives,
    )


def _of_rank(
    rank: int, read: Count, device_bytes: int, memory: Mapping[str, Memory], store: bool
) -> RankForecast:
    return RankForecast(
        rank=rank,
        read_bytes=read.nbytes,
        read_ops=read.reads,
        get_requests=read.requests if store else 0,
        get_bytes=read.fetched if store else 0,
        device_bytes=device_bytes,
        peak_host_bytes=memory["load"].host_bytes,
        peak_device_bytes=memory["load"].device_bytes,
        memory=memory,
        extents=read.files,
    )


def _shown(rates: Rates, world_size: int) -> dict[str, float | None]:
    """The rates as plain data: what does not limit is None."""
    named = {"storage": rates.link, "copy": rates.copy, "interconnect": rates.interconnect}
    if world_size > RANKS_OF_A_MACHINE:
        named["network"] = rates.network
    return {name: None if math.isinf(rate) else rate for name, rate in named.items()}


def forecast(
    request: Request, world_size: int, rank: int | None = None, asked: ForecastArguments | None = None
) -> WorldPlan:
    """The plan of every rank, or of one, without a process group; see ``zerostart.plan``."""
    with undisturbed():
        return _forecast(request, world_size, rank, asked or ForecastArguments())


def _forecast(request: Request, world_size: int, rank: int | None, asked: ForecastArguments) -> WorldPlan:
    clock = Clock()
    request = request.with_engine()
    engine = request.resolve(world_size, rank)
    # A world of one: nothing here waits for anybody. Not strict, since what is missing is part of the answer.
    known = prepare(request, engine, World(0, 1, None), clock, strict=False)
    # As many ranks share a machine's memory and cores there, whatever this one has.
    here = min(world_size, RANKS_OF_A_MACHINE)
    tuning = request.tuning(engine, known.catalog, default_device(), bool(known.recipes.computed), here)
    subject = Subject(known.catalog, known.built.model, known.recipes, known.coverage, known.origins)
    of = range(world_size) if rank is None else [rank]
    made = foresee(subject, engine, of, tuning, asked, request.exchange_of_reads(engine))
    return replace(made, planning_seconds=clock.stop()["total"], engine_reason=request.engine_reason)


#: Most ranks that are advised, as a multiple of those that are planned.
MOST = 64
#: Bytes of staging buffers with which reading is still fast.
SMALL = 1 << 20


def fits_of(memory: Sequence[Mapping[str, Memory]], limits: Limits, world_size: int) -> tuple[Fit, ...]:
    """How the highest peaks of all ranks compare with the limits that are known."""
    local = min(world_size, RANKS_OF_A_MACHINE)
    found = []
    for where, limit, ranks in (("device", limits.device, 1), ("host", limits.host, local)):
        of_phase = {
            phase: max(getattr(rank[phase], f"{where}_bytes") for rank in memory)
            for phase in (memory[0] if memory else ())
        }
        # None of these says anything: no limit, no ranks, or no memory but the host's.
        if limit is None or not of_phase or (where == "device" and not limits.accelerator):
            continue
        phase = max(of_phase, key=lambda name: of_phase[name])
        found.append(Fit(where, limit, of_phase[phase] * ranks, phase, ranks, limits.found))
    return tuple(found)


def advice(
    model: nn.Module, engine: Engine, staged: int, optimizer: OptimizerCost, limits: Limits
) -> tuple[tuple[str, ...], tuple[Alternative, ...]]:
    """The first change that makes the job fit, in words (or that none known here does), and all tried.

    ``staged`` are bytes on the host beside the shards while reading. More ranks are tried until they fit; all
    other changes on top of them where nothing else does.
    """

    def attempt(words: Sequence[str], changed: Engine) -> Alternative:
        return _attempted(words, changed, model, staged, optimizer, limits)

    # Each has those before it as well, so that the last is all that can be changed.
    changes = [(list[str](), engine), *engine.relaxations(limits.accelerator)]
    tried = [attempt(*change) for change in changes]
    # 1. More ranks, until it fits: with nothing else changed, and only if that fails with all changes.
    starts = [*changes[:1], *changes[1:][-1:]]  # as it is, and with all that can be changed
    for words, start in starts:
        if words and any(other.fit for other in tried):
            break
        for size in _sizes(start.mesh.world_size):
            more = replace(start, mesh=replace(start.mesh, world_size=size))
            tried.append(attempt([f"{size} ranks", *words], more))
            if tried[-1].fit:
                break
    # 2. Ranks that share experts or tensors, in the same two ways.
    for words, start in starts:
        if words and any(other.fit for other in tried):
            break
        tried += [attempt([split, *words], changed) for split, changed in _splits(start)]
    # Of what is as it was, nothing new is told, unless smaller buffers are all that it takes.
    found = tuple(other for other in tried if other.fits and other.change)
    best = next((other for other in found if other.fit), None)
    if best is None:
        none = f"no change known here makes it fit, {MOST} times the ranks included"
        return (f"{none}: give each rank more memory",), found
    room = ", ".join(f"{fit.needed / fit.limit:.0%} of the {fit.where} memory" for fit in best.fits)
    return (f"{best.change} (then {room})",), found


def _attempted(
    words: Sequence[str],
    changed: Engine,
    model: nn.Module,
    staged: int,
    optimizer: OptimizerCost,
    limits: Limits,
) -> Alternative:
    """The forecast of ``changed``, with small staging buffers if only these make it fit.

    Without any ``fits`` where no load can serve it.
    """
    target = Target(limits.accelerator, changed.mesh.world_size)
    try:
        # What an engine's library would say of a setting that nobody has asked for.
        with _unlogged():
            changed.check()
            parallelism = changed.parallelism(model)
            placed = changed.placements(model, parallelism)
            # Rank 0 stands for all.
            shares = parameter_bytes_alone(model, placed, parallelism, [0])
    # A change that no load can serve is no advice; it is listed without figures.
    except ZerostartError:
        return Alternative(" and ".join(words), ())
    made = []
    # First as it is: smaller buffers cost speed, and are named only where they decide.
    for buffers in (staged, min(staged, SMALL)):
        moments = moments_of(model, changed, placed, shares, buffers, optimizer, target)
        fits = fits_of(peaks(moments, 1, target), limits, target.world_size)
        told = [*words, *([f"memory_limit={SMALL}"] if buffers < staged else [])]
        made.append(Alternative(" and ".join(told), fits))
    return next((other for other in made if other.fit), made[0])


@contextmanager
def _unlogged() -> Iterator[None]:
    """Inside, no logger of this process says anything below an error."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)


def _sizes(world_size: int) -> list[int]:
    """Twice the ranks, and so on up to `MOST` times."""
    return [world_size << power for power in range(1, MOST.bit_length())]


def _splits(engine: Engine) -> Iterator[tuple[str, Engine]]:
    """As many ranks of a machine as divide them, to share experts or tensors where none do yet."""
    mesh = engine.mesh
    # Somebody has chosen how ranks share; that is not advised against.
    if (mesh.expert_parallel, mesh.tensor_parallel, mesh.sequence_parallel) != (1, 1, 1):
        return
    for size in (2, 4, RANKS_OF_A_MACHINE):
        for name in ("expert_parallel", "tensor_parallel"):
            if mesh.world_size % size == 0:
                changed = replace(mesh, **{name: size})
                yield f"{name}={size}", replace(engine, mesh=changed)
