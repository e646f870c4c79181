"""The whole forecast: what is read, what is shares, how long it takes, and whether it fits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from zerostart.distributed.world import World, default_device
from zerostart.engines import RANKS_OF_A_MACHINE
from zerostart.engines.forecast import Target
from zerostart.live.report import Clock
from zerostart.loading.forecast.memory import moments_of, optimizer_of, parameter_bytes, peaks
from zerostart.loading.forecast.reading import counts_of, owned_by, rates_of, timed
from zerostart.loading.forecast.result import Fit, Limits, Memory, RankForecast, WorldPlan
from zerostart.loading.preparation import prepare, undisturbed
from zerostart.loading.request import Request
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


def forecast(request: Request, world_size: int, rank: int | None, machine: Machine) -> WorldPlan:
    """Plan every rank, or only ``rank``, without a process group; see ``zerostart.plan``."""
    with undisturbed():
        return _forecast(request, world_size, rank, machine)


def _forecast(request: Request, world_size: int, rank: int | None, machine: Machine) -> WorldPlan:
    clock = Clock()
    request = request.with_engine()
    engine = request.resolve(world_size, rank)
    # A world of one waits for nobody. Not strict, since missing tensors are part of the answer.
    known = prepare(request, engine, World(0, 1, None), clock, strict=False)
    # As many ranks share a machine's memory and cores there, whatever this machine has.
    local = min(world_size, RANKS_OF_A_MACHINE)
    catalog, model, recipes = known.catalog, known.built.model, known.recipes
    tuning = request.tuning(engine, catalog, default_device(), bool(recipes.computed), local)
    # Check the arguments before the work.
    limits = Limits.of(machine.device_memory, machine.host_memory, world_size)
    rates = rates_of(tuning.rates, machine.storage_rate, machine.interconnect_rate)
    optimizer = optimizer_of(machine.optimizer, engine.configured_optimizer)
    target = Target(limits.accelerator, world_size)
    placed = engine.placements(model, known.parallelism)
    # Ranks that hold the same amounts are counted once, by the first of them.
    twins = {one: placed.twin(one) for one in (range(world_size) if rank is None else [rank])}
    shown = sorted(set(twins.values()))
    owned = owned_by(model, placed, shown)
    numels = {name: own.numels for name, own in owned.items()}
    shares = parameter_bytes(model, placed, known.parallelism, shown, numels)
    # One entry for each of ``shown``, as in all arrays that follow.
    counts = counts_of(catalog, known.origins, placed, owned, shown, tuning, not target.accelerator)
    staged = [(tuning.ring_bytes if count.staged else 0) + count.scratch for count in counts]
    moments = moments_of(model, engine, placed, shares, np.array(staged, np.int64), optimizer, target)
    memory = dict(zip(shown, peaks(moments, len(shown), target), strict=True))
    # ``0 * shares.trained`` makes an array of a number: one entry for each rank, as the others are.
    resident = (shares.device if placed.held is None else placed.held) + shares.buffers + 0 * shares.trained
    on_device = dict(zip(shown, resident.tolist(), strict=True))
    read = dict(zip(shown, counts, strict=True))
    ranks = [_of_rank(one, read[twin], on_device[twin], memory[twin]) for one, twin in twins.items()]
    stored = catalog.storage.nbytes if catalog.storage.cached else math.inf
    return WorldPlan(
        engine=engine.name,
        world_size=world_size,
        ranks=timed(ranks, world_size, placed.gathered, stored, rates),
        checkpoint_bytes=catalog.nbytes,
        parameters=sum(entry.numel for entry in catalog.weights.values()),
        largest_tensor_bytes=max((entry.nbytes for entry in catalog.weights.values()), default=0),
        planning_seconds=clock.stop()["total"],
        missing=known.coverage.missing,
        unexpected=known.coverage.unexpected,
        computed=recipes.computed,
        computed_whole=recipes.computed_whole,
        exchanged_bytes=(placed.gathered,) * len(ranks) if placed.gathered else (),
        tier=placed.residence,
        zero_stage=engine.zero_stage,
        engine_reason=request.engine_reason,
        optimizer=optimizer.name,
        accelerator=limits.accelerator,
        rates=_shown(rates),
        fits=fits_of([one.memory for one in ranks], limits, world_size),
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
