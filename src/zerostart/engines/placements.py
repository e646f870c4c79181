"""How an engine will shard parameters and where it keeps them, without the engine or any process group."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import nn

from zerostart.distributed.world import default_device
from zerostart.engines.placement import parallel_layout
from zerostart.engines.residence import MemoryFit, Residence, residence_of
from zerostart.layout import Layout, Parallelism, replicated
from zerostart.layout.flat import FlatRules

__all__ = ["DEVICE", "HOST", "RANKS_OF_A_MACHINE", "STORAGE", "Placements", "planned", "rules_of"]

#: Homes of a shard: the device that computes, host memory, or a file.
DEVICE, HOST, STORAGE = "device", "host", "storage"

#: How many ranks a plan takes to be on one machine.
RANKS_OF_A_MACHINE = 8

Parameters = Mapping[str, nn.Parameter]


@dataclass(frozen=True)
class Placements:
    """The shards of a model to be.

    ``layout`` gives what a rank holds of a parameter, by name. Parameters of one shape and an equal ``alike``
    lie alike. ``twin`` is the first rank that holds the same as the given one: replicas have one twin.
    ``homes`` has the home of each parameter.
    """

    layout: Callable[[str, int], Layout]
    alike: Callable[[str], Hashable]
    twin: Callable[[int], int]
    homes: Mapping[str, str]
    #: Bytes that each rank holds of all parameters on the device, where that is more than it reads of them.
    held: int | None = None
    #: Bytes that each rank gets from the others when all have read what they want.
    gathered: int = 0
    #: Where whole parameters would lie if the ranks had machines like this one.
    residence: Residence | None = None


def planned(
    engine: str,
    config: Mapping[str, Any] | None,
    model: nn.Module,
    parallelism: Parallelism,
    zero_stage: int = 3,
    exchange: bool | None = None,
) -> Placements:
    """Raises ConfigError or EngineError for what ``load`` would refuse of the configuration."""
    parameters = dict(model.named_parameters())
    if zero_stage == 0 or (engine == "deepspeed" and zero_stage < 3):
        rules = rules_of(engine, config, zero_stage, parallelism.mesh.world_size)
        return _of_whole(parameters, parallelism, rules, engine, zero_stage, exchange)
    if engine == "deepspeed":
        return _of_deepspeed(config, parameters, parallelism)
    if parallelism.mesh.parallel:
        return _of_mesh(engine, parameters, parallelism, dict.fromkeys(parameters, DEVICE))
    return _of_fsdp2(config, parameters, parallelism.mesh.world_size)


def _of_mesh(
    engine: str, parameters: Parameters, parallelism: Parallelism, homes: Mapping[str, str]
) -> Placements:
    def layout(name: str, rank: int) -> Layout:
        return parallel_layout(engine, parallelism, name, tuple(parameters[name].shape), rank)

    return Placements(
        layout=layout,
        alike=lambda name: (parallelism.is_expert(name), parallelism.cut(name)),
        twin=lambda rank: rank,
        homes=homes,
    )


def _of_deepspeed(
    config: Mapping[str, Any] | None, parameters: Parameters, parallelism: Parallelism
) -> Placements:
    from zerostart.engines.deepspeed.settings import ZeroSettings

    settings = ZeroSettings.of(config)
    settings.check_mesh(parallelism.mesh)
    # Of rank 0, which has as many experts as any.
    sizes = {
        name: (
            prod(parallelism.section(name, tuple(parameter.shape), 0).shape),
            parallelism.owners(name, 0)[1],
            parameter.dtype.itemsize,
        )
        for name, parameter in parameters.items()
    }
    names = {"none": DEVICE, "cpu": HOST, "nvme": STORAGE}
    homes = {name: names[home] for name, home in settings.homes(sizes, parallelism.mesh.world_size).items()}
    return _of_mesh("deepspeed", parameters, parallelism, homes)


def rules_of(engine: str, config: Mapping[str, Any] | None, zero_stage: int, partitions: int) -> FlatRules:
    """How whole parameters lie one after the other in their flat buffers."""
    if engine == "deepspeed":
        from zerostart.engines.deepspeed.flat import flat_rules

        return flat_rules(config, zero_stage, partitions)
    return FlatRules(partitions)


def _of_whole(
    parameters: Parameters,
    parallelism: Parallelism,
    rules: FlatRules,
    engine: str,
    zero_stage: int,
    exchange: bool | None,
) -> Placements:
    from zerostart.engines.flat_buffers import buffers_of, exchanges, families_of

    size = rules.partitions
    # Of rank 0, which has as many experts as any.
    families = families_of(parameters, rules, exchanges(exchange, size), parallelism, 0)
    buffers = buffers_of(families)
    held = sum(buffer.nbytes for buffer in buffers)
    here = MemoryFit.here(default_device())
    rooms = [here] * (min(size, RANKS_OF_A_MACHINE) if here.on_host else 1)
    parts: dict[str, Callable[[int], Layout]] = {}
    exchanged = [buffer for buffer in buffers if buffer.family.exchange]
    for buffer in exchanged:
        for place, name in enumerate(buffer.names):
            parts[name] = buffer.group.share(place, parameters[name].shape, size)
    experts = {name: held for family in families for name, (held, _) in family.held.items()}
    runs = {**parts, **experts}

    def alike(name: str) -> Hashable:
        return ("expert", parallelism.cut(name)) if name in experts else name if name in parts else None

    return Placements(
        layout=lambda name, rank: runs[name](rank) if name in runs else replicated(parameters[name].shape),
        alike=alike,
        # With an exchange each rank wants a share of its own; without, ranks differ in their experts alone.
        twin=lambda rank: rank if parts else parallelism.mesh.expert(rank)[0] if experts else 0,
        homes=dict.fromkeys(parameters, DEVICE),
        held=held,
        gathered=sum(buffer.received for buffer in exchanged),
        residence=residence_of(held, rooms, engine == "deepspeed", zero_stage > 0),
    )


def _of_fsdp2(config: Mapping[str, Any] | None, parameters: Parameters, world_size: int) -> Placements:
    from zerostart.engines.fsdp2.layouts import parameter_layout
    from zerostart.engines.fsdp2.settings import FSDP2Settings

    settings = FSDP2Settings.of(config)
    _, shares = settings.shape(world_size)
    dims = settings.dimensions(parameters, shares)
    share_of = functools.cache(functools.partial(settings.share_of, world_size=world_size))
    first: dict[int, int] = {}
    for rank in range(world_size):
        first.setdefault(share_of(rank), rank)

    def layout(name: str, rank: int) -> Layout:
        return parameter_layout(tuple(parameters[name].shape), share_of(rank), shares, dims[name])

    return Placements(
        layout=layout,
        alike=lambda name: dims[name],
        twin=lambda rank: first[share_of(rank)],
        homes=dict.fromkeys(parameters, HOST if settings.offloaded else DEVICE),
    )
