"""ZeRO-3 partitions where experts live on several ranks: each expert partitioned among its owners alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zerostart.distributed.world import World
from zerostart.engines.deepspeed.cutting import cut_experts
from zerostart.engines.deepspeed.engine import DeepSpeedShards, current_shards
from zerostart.engines.names import loaded_names
from zerostart.engines.placement import parallel_layout
from zerostart.engines.shard import Shard
from zerostart.layout import Layout, Parallelism
from zerostart.upstream.deepspeed_experts import ExpertGroups, mark_expert

__all__ = ["DeepSpeedExpertShards", "expert_shards"]


class DeepSpeedExpertShards(DeepSpeedShards):
    """Makes ZeRO-3 partitions, of experts over their owners and of the rest over the whole world."""

    def __init__(
        self,
        world: World,
        dtype: torch.dtype | None,
        engine_config: Mapping[str, Any] | None,
        parallelism: Parallelism,
    ) -> None:
        super().__init__(world, dtype, engine_config)
        self._parallelism = parallelism
        self._groups = ExpertGroups(parallelism.mesh.expert_parallel)

    def shard(self, model: nn.Module, names: Sequence[str]) -> list[Shard]:
        """Cut the experts and make them serve all ranks' tokens; then partition everything."""
        groups = self._groups
        cut_experts(model, self._parallelism, self._world.rank, groups, lambda p: mark_expert(p, groups))
        return super().shard(model, names)

    def _at(self, name: str, parameter: nn.Parameter) -> Callable[[int], Layout]:
        return _layouts(self._parallelism, name)


def expert_shards(model: nn.Module, parallelism: Parallelism, rank: int) -> dict[str, Shard]:
    """The ZeRO-3 partitions of ``model`` as they are now, with layouts of the unsharded parameters."""
    names = loaded_names(model)
    found = current_shards(model)
    for alias, shard in found.items():
        name = names[alias]  # A tied parameter lies as its first name says.
        if parallelism.is_expert(name):
            at = _layouts(parallelism, name)
            found[alias] = Shard(name, at(rank), shard.storage, at)
    return found


def _layouts(parallelism: Parallelism, name: str) -> Callable[[int], Layout]:
    return functools.partial(parallel_layout, "deepspeed", parallelism, name, parallelism.shapes[name])
