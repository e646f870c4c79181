"""ZeRO-3 partitions by the meta route.

A parameter is never whole: a new one is made whose data is a single element expanded to the logical shape,
DeepSpeed attaches its machinery to it, the partition is allocated at partition size, and the placeholder is
freed. What ``deepspeed.initialize`` then finds is what ``zero.Init`` would have left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zerostart.engines.deepspeed.layouts import parameter_layout
from zerostart.engines.deepspeed.masters import check_mixture
from zerostart.engines.shard import Shard, replace_everywhere
from zerostart.errors import EngineError
from zerostart.layout import Layout
from zerostart.transfer import Arena
from zerostart.upstream import deepspeed as upstream
from zerostart.world import World

__all__ = ["DeepSpeedShards", "configured_dtype", "current_shards"]


def configured_dtype(config: Mapping[str, Any] | None) -> torch.dtype | None:
    """The parameter dtype that a DeepSpeed configuration asks for, None if it does not say."""
    for key, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16)):
        section = (config or {}).get(key)
        if isinstance(section, Mapping) and section.get("enabled") is True:
            return dtype
    return None


class DeepSpeedShards:
    """Makes ZeRO-3 partitions over the whole world."""

    def __init__(
        self, world: World, dtype: torch.dtype | None, engine_config: Mapping[str, Any] | None
    ) -> None:
        self._world = world
        zero = (engine_config or {}).get("zero_optimization", {})
        stage = zero.get("stage", 3)
        if stage != 3:
            raise EngineError(f"engine_config asks for ZeRO stage {stage}, and the load for stage 3")
        offload = zero.get("offload_param") or {}
        if offload.get("device", "none") not in ("none", None):
            raise EngineError(
                f"offload_param to {offload['device']} is not available in this version; remove it from "
                "engine_config['zero_optimization']"
            )
        self._config = engine_config
        self._init = upstream.partitioner(world.size, dtype or configured_dtype(engine_config), engine_config)
        self.device = upstream.parameter_device(self._init)

    def shard(self, model: nn.Module, names: Sequence[str]) -> list[Shard]:
        """Replace each parameter by an empty ZeRO-3 parameter."""
        parameters = dict(model.named_parameters())
        check_mixture(parameters, self._config)
        arena = Arena(self.device)
        placed: list[tuple[str, Layout, int]] = []
        for name in names:
            layout = self._layout(name, parameters[name])
            placed.append((name, layout, arena.reserve(layout.numel, parameters[name].dtype)))
        new: dict[int, nn.Parameter] = {}
        shards = []
        for name, layout, place in placed:
            old = parameters[name]
            partition = arena.take(place, layout.numel, old.dtype)
            new[id(old)] = upstream.partitioned_parameter(self._init, old, partition)
            shards.append(Shard(name, layout, partition))
        replace_everywhere(model, new)
        return shards

    def _layout(self, name: str, parameter: nn.Parameter) -> Layout:
        """What this rank holds of the parameter ``name`` of the unsharded model."""
        return parameter_layout(parameter.shape, self._world.rank, self._world.size)

    def finish(self, model: nn.Module) -> None:
        """Nothing is left to do: a partition is in place as soon as it is filled."""


def current_shards(model: nn.Module) -> dict[str, Shard]:
    """The ZeRO-3 partitions of ``model`` as they are now."""
    shards = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        state = upstream.partition_of(parameter)
        if state is not None:
            partition, shape, rank, size = state
            shards[name] = Shard(name, parameter_layout(shape, rank, size), partition)
    return shards
