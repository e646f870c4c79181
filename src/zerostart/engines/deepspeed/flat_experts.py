"""ZeRO-2 where experts live on several ranks: experts in flat buffers of their own, over their owners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from zerostart.distributed.world import World
from zerostart.engines.deepspeed.cutting import cut_experts
from zerostart.engines.deepspeed.flat import FlatShards, check_stage
from zerostart.engines.flat_buffers import held_layouts
from zerostart.engines.names import loaded_names
from zerostart.engines.residence import Residence
from zerostart.engines.shard import Shard
from zerostart.layout import Parallelism
from zerostart.upstream.deepspeed_experts import ExpertGroups
from zerostart.upstream.deepspeed_flat_experts import mark_flat_expert

__all__ = ["FlatExpertShards", "flat_expert_shards"]


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
        super().__init__(world, zero_stage, engine_config, exchange, parallelism)
        self._groups = ExpertGroups(parallelism.mesh.expert_parallel)

    def agree_on_residence(self, model: nn.Module, names: Sequence[str], alone: bool = False) -> Residence:
        """Cut the experts and make them serve all ranks' tokens; then find room for what is left."""
        with self._world.phase("cutting the experts"):
            cut_experts(
                model,
                self._parallelism,
                self._world.rank,
                self._groups,
                lambda p: mark_flat_expert(p, self._groups),
            )
        return super().agree_on_residence(model, names, alone)


def flat_expert_shards(model: nn.Module, parallelism: Parallelism, rank: int) -> dict[str, Shard]:
    """The experts of ``model`` on this rank, with layouts of the unsharded parameters."""
    found = {}
    names = loaded_names(model)
    for alias, parameter in model.named_parameters(remove_duplicate=False):
        name = names[alias]
        if parallelism.is_expert(name):
            at = held_layouts(parallelism, name)
            found[alias] = Shard(name, at(rank), parameter.detach().view(-1), at)
    return found
