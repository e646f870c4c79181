"""How an engine will shard parameters and where it keeps them, without the engine or any process group."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from zerostart.engines.placement import parallel_layout
from zerostart.layout import Layout, Parallelism, replicated

__all__ = ["DEVICE", "HOST", "STORAGE", "Planned", "planned"]

#: Homes of a shard: the device that computes, host memory, or a file.
DEVICE, HOST, STORAGE = "device", "host", "storage"

Parameters = Mapping[str, nn.Parameter]


@dataclass(frozen=True)
class Planned:
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


def planned(
    engine: str,
    config: Mapping[str, Any] | None,
    model: nn.Module,
    parallelism: Parallelism,
    zero_stage: int = 3,
    exchange: bool | None = None,
) -> Planned:
    """Raises ConfigError or EngineError for what ``load`` would refuse of the configuration."""
    parameters = dict(model.named_parameters())
    if engine == "deepspeed" and zero_stage < 3:
        return _of_flat(config, parameters, parallelism, zero_stage, exchange)
    if engine == "deepspeed":
        return _of_deepspeed(config, parameters, parallelism)
    if parallelism.mesh.parallel:
        return _of_mesh(engine, parameters, parallelism, dict.fromkeys(parameters, DEVICE))
    return _of_fsdp2(config, parameters, parallelism.mesh.world_size)


def _of_mesh(
    engine: str, parameters: Parameters, parallelism: Parallelism, homes: Mapping[str, str]
) -> Planned:
    def layout(name: str, rank: int) -> Layout:
        return parallel_layout(engine, parallelism, name, tuple(parameters[name].shape), rank)

    return Planned(
        layout=layout,
        alike=lambda name: (parallelism.is_expert(name), parallelism.cut(name)),
        twin=lambda rank: rank,
        homes=homes,
    )


def _of_deepspeed(
    config: Mapping[str, Any] | None, parameters: Parameters, parallelism: Parallelism
) -> Planned:
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


def _of_flat(
    config: Mapping[str, Any] | None,
    parameters: Parameters,
    parallelism: Parallelism,
    zero_stage: int,
    exchange: bool | None,
) -> Planned:
    """Experts have buffers of their own, which their owners all read; see ``deepspeed.flat_experts``."""
    experts = {name: p for name, p in parameters.items() if parallelism.is_expert(name)}
    dense = {name: p for name, p in parameters.items() if name not in experts}
    planned = _of_dense(config, dense, parallelism.mesh.world_size, zero_stage, exchange)
    if not experts:
        return planned
    from zerostart.engines.deepspeed.flat import capacity, flat_groups, flat_rules
    from zerostart.engines.deepspeed.flat_experts import held_layouts

    owners = parallelism.mesh.expert_data(0)[1]
    # Of rank 0, which has as many experts as any.
    local = {
        name: nn.Parameter(
            torch.empty(parallelism.section(name, tuple(p.shape), 0).shape, dtype=p.dtype, device="meta"),
            requires_grad=p.requires_grad,
        )
        for name, p in experts.items()
    }
    groups = flat_groups(local, flat_rules(config, zero_stage, owners))
    held = sum(capacity(group, owners, d.itemsize) * d.itemsize for d, (_, group) in groups.items())
    layouts = {name: held_layouts(parallelism, name) for name in experts}

    def layout(name: str, rank: int) -> Layout:
        return layouts[name](rank) if name in layouts else planned.layout(name, rank)

    def alike(name: str) -> Hashable:
        return ("expert", parallelism.cut(name)) if name in layouts else planned.alike(name)

    def twin(rank: int) -> int:
        # With an exchange each rank wants a share of its own of what is dense.
        return rank if planned.gathered else parallelism.mesh.expert(rank)[0]

    return Planned(
        layout=layout,
        alike=alike,
        twin=twin,
        homes=dict.fromkeys(parameters, DEVICE),
        held=(planned.held or 0) + held,
        gathered=planned.gathered,
    )


def _of_dense(
    config: Mapping[str, Any] | None,
    parameters: Parameters,
    world_size: int,
    zero_stage: int,
    exchange: bool | None,
) -> Planned:
    from zerostart.engines.deepspeed.flat import capacity, exchanges, flat_groups, flat_rules

    groups = flat_groups(parameters, flat_rules(config, zero_stage, world_size))
    held = {d: capacity(group, world_size, d.itemsize) * d.itemsize for d, (_, group) in groups.items()}
    homes = dict.fromkeys(parameters, DEVICE)
    if not exchanges(exchange, world_size):
        return Planned(
            layout=lambda name, _: replicated(parameters[name].shape),
            alike=lambda _: None,
            twin=lambda _: 0,
            homes=homes,
            held=sum(held.values()),
        )
    runs: dict[str, Callable[[int], Layout]] = {}
    gathered = 0
    for dtype, (names, group) in groups.items():
        gathered += (group.numel - group.numel // world_size) * dtype.itemsize
        runs |= {
            name: group.share(place, parameters[name].shape, world_size) for place, name in enumerate(names)
        }
    return Planned(
        layout=lambda name, rank: runs[name](rank),
        alike=lambda name: name,
        twin=lambda rank: rank,
        homes=homes,
        held=sum(held.values()),
        gathered=gathered,
    )


def _of_fsdp2(config: Mapping[str, Any] | None, parameters: Parameters, world_size: int) -> Planned:
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

    return Planned(
        layout=layout,
        alike=lambda name: dims[name],
        twin=lambda rank: first[share_of(rank)],
        homes=dict.fromkeys(parameters, HOST if settings.offloaded else DEVICE),
    )
