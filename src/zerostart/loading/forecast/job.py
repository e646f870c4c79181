"""The whole forecast: what is read, what is shares, how long it takes, and whether it fits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from zerostart.checkpoint.catalog import Catalog
from zerostart.distributed.world import World, default_device
from zerostart.engines import RANKS_OF_A_MACHINE, Engine
from zerostart.engines.forecast import Target
from zerostart.live.report import Clock
from zerostart.loading.forecast.memory import moments_of, optimizer_of, parameter_bytes, peaks
from zerostart.loading.forecast.reading import Foreseen, counts_of, owned_by, rates_of, timed
from zerostart.loading.forecast.result import Fit, Limits, Memory, RankForecast, WorldPlan
from zerostart.loading.preparation import prepare, undisturbed
from zerostart.loading.request import Request
from zerostart.models import Origins
from zerostart.recipe import Coverage, Recipes
from zerostart.transfer import Tuning
from zerostart.transfer.planning import Count
from zerostart.transfer.tuning import Rates


@dataclass(frozen=True)
class Machine:
    """The machine and the optimizer that a forecast is for, as ``zerostart.plan`` describes them."""

    device_memory: int | None = None
    host_memory: int | None = None
    storage_rate: float | None = None
    interconnect_rate: float | None = None
    optimizer: str | None = None


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
    asked: Machine,
    exchange: bool | None,
) -> WorldPlan:
    """The plan of ``ranks``; ``exchange``: whether bytes that several want must be read once.

    Raises ConfigError for arguments out of range, or an exchange that does not fit into the memory limit.
    """
    # All that may be refused first, from the arguments alone.
    limits = Limits.of(asked.device_memory, asked.host_memory, engine.mesh.world_size)
    rates = rates_of(tuning.rates, asked.storage_rate, asked.interconnect_rate)
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
    catalog, recipes = subject.catalog, subject.recipes
    forecasts = [_of_rank(rank, read[twin], on_device[twin], memory[twin]) for rank, twin in twins.items()]
    made = WorldPlan(
        engine=engine.name,
        world_size=engine.mesh.world_size,
        ranks=tuple(forecasts),
        checkpoint_bytes=catalog.nbytes,
        parameters=sum(entry.numel for entry in catalog.weights.values()),
        largest_tensor_bytes=max((entry.nbytes for entry in catalog.weights.values()), default=0),
        planning_seconds=0.0,
        missing=subject.coverage.missing,
        unexpected=subject.coverage.unexpected,
        computed=recipes.computed,
        computed_whole=recipes.computed_whole,
    )
    # Own slices first; whether bytes are read once instead changes reads and staging of what is made so far.
    foreseen = Foreseen(catalog, subject.origins, placed, tuning, not target.accelerator)
    made = foreseen.exchanged(made, exchange, owned, shown)
    stored = catalog.storage.nbytes if catalog.storage.cached else math.inf
    return replace(
        made,
        ranks=timed(made, stored, rates),
        zero_stage=engine.zero_stage,
        tier=placed.residence,
        optimizer=optimizer.name,
        accelerator=limits.accelerator,
        rates=_shown(rates),
        fits=fits_of([rank.memory for rank in made.ranks], limits, made.world_size),
    )


def _of_rank(rank: int, read: Count, device_bytes: int, memory: Mapping[str, Memory]) -> RankForecast:
    return RankForecast(
        rank=rank,
        read_bytes=read.nbytes,
        read_ops=read.reads,
        device_bytes=device_bytes,
        peak_host_bytes=memory["load"].host_bytes,
        peak_device_bytes=memory["load"].device_bytes,
        memory=memory,
    )


def _shown(rates: Rates) -> dict[str, float | None]:
    """Return the rates as plain data; None is no limit."""
    named = {"storage": rates.link, "copy": rates.copy, "interconnect": rates.interconnect}
    return {name: None if math.isinf(rate) else rate for name, rate in named.items()}


def forecast(
    request: Request, world_size: int, rank: int | None = None, asked: Machine | None = None
) -> WorldPlan:
    """The plan of every rank, or of one, without a process group; see ``zerostart.plan``."""
    with undisturbed():
        return _forecast(request, world_size, rank, asked or Machine())


def _forecast(request: Request, world_size: int, rank: int | None, asked: Machine) -> WorldPlan:
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
