"""One rank's load, played by a process that is alone: its own bytes, read into its own shards.

What a rank of a big job will read, hold and wait for can be tried on one machine before the job has any
others. There is no engine here: the shards are those that the engine's layout gives the rank.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from zerostart.distributed.world import World, default_device
from zerostart.engines import DEVICE, FlatBufferShards, Placements, Residence, Shard, planned, rules_of
from zerostart.errors import ConfigError
from zerostart.loading.destinations import Destinations
from zerostart.loading.preparation import Prepared, prepare, undisturbed
from zerostart.loading.report import Clock, Report
from zerostart.loading.request import Request
from zerostart.loading.run import reported
from zerostart.planning import PlanOptions, join
from zerostart.transfer import Arena, PeakMeter

__all__ = ["rehearse"]


def rehearse(request: Request, world_size: int, rank: int) -> tuple[Report, list[Shard]]:
    """Do what ``rank`` of ``world_size`` does in a load of ``request``, without the other ranks.

    Gives its report, and its shards, filled. Buffers are loaded whole, as on every rank; what the checkpoint
    lacks is initialised. Raises what
    ``zerostart.load`` raises, and ConfigError for a rank that is not there.
    """
    if request.exchange and not request.flat:
        raise ConfigError("exchange=True needs all ranks, and a rehearsal has one; leave it out")
    with undisturbed():
        return _rehearse(request, world_size, rank)


def _rehearse(request: Request, world_size: int, rank: int) -> tuple[Report, list[Shard]]:
    clock, alone, device = Clock(), World(0, 1, None), default_device()
    with PeakMeter(device) as meter:
        request.check()
        mesh = request.mesh(world_size, rank)
        known = prepare(request, alone, mesh, clock, request.strict)
        with clock.phase("build"):
            model, origins = known.built.model, known.origins
            names, residence = list(origins.parameters), None
            if request.flat:
                shards, residence = _whole(request, known, names, world_size, rank)
            else:
                placed = planned(request.engine, request.engine_config, model, known.parallelism)
                shards = _shards(model, names, placed, rank)
            destinations = Destinations.of(model, origins, shards, device)
        with clock.phase("plan"):
            tuning = request.tuning(known.catalog, device, bool(known.recipes.computed))
            plan = join(known.catalog, destinations.wanted(), PlanOptions(tuning.chunk_size))
        with clock.phase("read"):
            moved = destinations.read(plan, tuning, None, request.progress, alone)
            destinations.initialise_missing(alone)
    made = reported(known, request, (rank, world_size), clock, moved, meter)
    return replace(made, tier=residence), shards


def _whole(
    request: Request, known: Prepared, names: Sequence[str], world_size: int, rank: int
) -> tuple[list[Shard], Residence | None]:
    """Flat buffers as large as they will be, in the memory of this one process.

    Where the ranks are to exchange what they read, the rest of the buffers stays as it is.
    """
    rules = rules_of(request.engine, request.engine_config, request.zero_stage, world_size)
    world, model = World(rank, world_size, None), known.built.model
    engine = FlatBufferShards(world, request.zero_stage, rules, request.exchange, known.parallelism)
    residence = engine.agree_on_residence(model, names, alone=True)
    return engine.shard(model, names), residence


def _shards(model: nn.Module, names: Sequence[str], placed: Placements, rank: int) -> list[Shard]:
    """The shards of the parameters ``names`` that ``rank`` holds, uninitialised.

    What the engine would keep in host memory or in files is put into host memory.
    """
    parameters = dict(model.named_parameters())
    arenas = {False: Arena(torch.device("cpu")), True: Arena(default_device())}
    reserved = []
    for name in names:
        layout, dtype = placed.layout(name, rank), parameters[name].dtype
        arena = arenas[placed.homes[name] == DEVICE]
        reserved.append((name, layout, dtype, arena, arena.reserve(layout.numel, dtype)))
    return [
        Shard(name, layout, arena.take(place, layout.numel, dtype), functools.partial(placed.layout, name))
        for name, layout, dtype, arena, place in reserved
    ]
