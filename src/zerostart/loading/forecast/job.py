"""Forecast reads, memory and seconds of all ranks of a job."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from zerostart.distributed.world import World, default_device
from zerostart.engines import RANKS_OF_A_MACHINE
from zerostart.engines.forecast import Hardware
from zerostart.live.report import Clock
from zerostart.loading.forecast.memory import moments_of, optimizer_of, parameter_bytes, peaks
from zerostart.loading.forecast.reading import counts_of, owned_by, rates_of, timed
from zerostart.loading.forecast.result import Fit, Limits, PhaseMemory, RankForecast, WorldPlan
from zerostart.loading.preparation import isolated, prepare
from zerostart.loading.request import Request
from zerostart.transfer.planning import Count
from zerostart.transfer.tuning import Rates


@dataclass(frozen=True)
class Machine:
    """Machine and optimizer of a forecast: arguments of ``zerostart.plan``."""

    device_memory: int | None = None
    host_memory: int | None = None
    storage_rate: float | None = None
    interconnect_rate: float | None = None
    optimizer: str | None = None


def forecast(request: Request, world_size: int, rank: int | None, machine: Machine) -> WorldPlan:
    """Plan every rank, or only ``rank``, without a process group; see ``zerostart.plan``."""
    with isolated():
        return _forecast(request, world_size, rank, machine)


def _forecast(request: Request, world_size: int, rank: int | None, machine: Machine) -> WorldPlan:
    clock = Clock()
    request = request.with_engine()
    engine = request.resolve(world_size, rank)
    # Not strict: missing tensors are part of the forecast.
    prepared = prepare(request, engine, World(0, 1, None), clock, strict=False)
    # Number of ranks that share the memory and processors of a machine.
    local = min(world_size, RANKS_OF_A_MACHINE)
    catalog, model, recipes = prepared.catalog, prepared.built.model, prepared.recipes
    tuning = request.tuning(engine, catalog, default_device(), bool(recipes.computed), local)
    # Check the arguments before the work.
    limits = Limits.of(machine.device_memory, machine.host_memory, world_size)
    rates = rates_of(tuning.rates, machine.storage_rate, machine.interconnect_rate)
    optimizer = optimizer_of(machine.optimizer, engine.configured_optimizer)
    target = Hardware(limits.accelerator, world_size)
    placed = engine.placements(model, prepared.parallelism)
    # Ranks with equal shards are counted once.
    twins = {one: placed.twin(one) for one in (range(world_size) if rank is None else [rank])}
    shown = sorted(set(twins.values()))
    owned = owned_by(model, placed, shown)
    numels = {name: own.numels for name, own in owned.items()}
    shares = parameter_bytes(model, placed, prepared.parallelism, shown, numels)
    # Arrays have one entry for each rank of ``shown``.
    counts = counts_of(catalog, prepared.origins, placed, owned, shown, tuning, not target.accelerator)
    staged = [(tuning.ring_bytes if count.staged else 0) + count.scratch for count in counts]
    moments = moments_of(model, engine, placed, shares, np.array(staged, np.int64), optimizer, target)
    memory = dict(zip(shown, peaks(moments, len(shown), target), strict=True))
    # ``0 * shares.trained`` makes an array of a single number.
    own = shares.device if placed.resident_bytes is None else placed.resident_bytes
    resident = own + shares.buffers + 0 * shares.trained
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
        missing=prepared.coverage.missing,
        unexpected=prepared.coverage.unexpected,
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


def _of_rank(rank: int, read: Count, device_bytes: int, memory: Mapping[str, PhaseMemory]) -> RankForecast:
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
    """Return the rates as plain data; None if unlimited."""
    named = {"storage": rates.link, "copy": rates.copy, "interconnect": rates.interconnect}
    return {name: None if math.isinf(rate) else rate for name, rate in named.items()}


def fits_of(memory: Sequence[Mapping[str, PhaseMemory]], limits: Limits, world_size: int) -> tuple[Fit, ...]:
    """Compare the highest peaks of all ranks with the prepared limits."""
    local = min(world_size, RANKS_OF_A_MACHINE)
    fits = []
    for where, limit, ranks in (("device", limits.device, 1), ("host", limits.host, local)):
        of_phase = {
            phase: max(getattr(rank[phase], f"{where}_bytes") for rank in memory)
            for phase in (memory[0] if memory else ())
        }
        if limit is None or not of_phase or (where == "device" and not limits.accelerator):
            continue
        phase = max(of_phase, key=lambda name: of_phase[name])
        fits.append(Fit(where, limit, of_phase[phase] * ranks, phase, ranks, limits.found))
    return tuple(fits)
