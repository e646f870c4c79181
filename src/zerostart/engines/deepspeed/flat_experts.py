"""ZeRO-2 where experts live on several ranks: experts in flat buffers of their own, over their owners."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from torch import nn

from zerostart.engines.deepspeed.cutting import cut_experts
from zerostart.engines.deepspeed.flat import Family, FlatShards, check_stage
from zerostart.engines.shard import Shard
from zerostart.layout import Layout, Parallelism, replicated
from zerostart.upstream.deepspeed_experts import ExpertGroups
from zerostart.upstream.deepspeed_flat_experts import mark_flat_expert
from zerostart.world import World

__all__ = ["FlatExpertShards", "flat_expert_shards", "held_layouts"]


class FlatExpertShards(FlatShards):
    """Makes flat buffers of this rank's experts, and of the rest; an expert's owners all read it."""

    def __init__(
        self,
        world: World,
        zero_stage: int,
        engine_config: Mapping[str, Any] | None,
        exchange: bool | None,
        parallelism: Parallelism,
    ) -> None:
        check_stage(zero_stage, engine_config, True)
        super().__init__(world, zero_stage, engine_config, exchange)
        self._parallelism = parallelism
        self._groups = ExpertGroups(parallelism.mesh.expert_parallel)

    def shard(self, model: nn.Module, names: Sequence[str]) -> list[Shard]:
        """Cut the experts and make them serve all ranks' tokens; then put everything into buffers."""
        cut_experts(
            model,
            self._parallelism,
            self._world.rank,
            self._groups,
            lambda p: mark_flat_expert(p, self._groups),
        )
        return super().shard(model, names)

    def _families(self, parameters: Mapping[str, nn.Parameter]) -> list[Family]:
        rank, parallelism = self._world.rank, self._parallelism
        experts = {name: p for name, p in parameters.items() if parallelism.is_expert(name)}
        dense = {name: p for name, p in parameters.items() if name not in experts}
        held = {name: (held_layouts(parallelism, name), _first(parallelism, name, rank)) for name in experts}
        owners = parallelism.mesh.expert_data(rank)[1]
        return [
            *super()._families(dense),
            Family(experts, replace(self._rules, partitions=owners), False, held),
        ]


def held_layouts(parallelism: Parallelism, name: str) -> Callable[[int], Layout]:
    """What each rank holds of the experts' parameter ``name``: all of its experts."""
    return functools.partial(_held, parallelism, name)


def _held(parallelism: Parallelism, name: str, rank: int) -> Layout:
    section = parallelism.section(name, parallelism.shapes[name], rank)
    return section.holds(replicated(section.shape))


def _first(parallelism: Parallelism, name: str, rank: int) -> int:
    """The element of the whole parameter with which the rank's experts begin; they are cut along dim 0."""
    box, _ = parallelism.section(name, parallelism.shapes[name], rank).boxes[0]
    return box.origin[0] * prod(parallelism.shapes[name][1:])


def flat_expert_shards(model: nn.Module, parallelism: Parallelism, rank: int) -> dict[str, Shard]:
    """The experts of ``model`` on this rank, with layouts of the unsharded parameters."""
    found = {}
    first: dict[int, str] = {}
    for alias, parameter in model.named_parameters(remove_duplicate=False):
        name = first.setdefault(id(parameter), alias)
        if parallelism.is_expert(name):
            at = held_layouts(parallelism, name)
            found[alias] = Shard(name, at(rank), parameter.detach().view(-1), at)
    return found
