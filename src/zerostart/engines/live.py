"""The shards of a live model, whichever engine holds it and whoever has loaded it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from zerostart.distributed.world import World
from zerostart.engines.registry import engine_names, family_of
from zerostart.engines.shard import Shard
from zerostart.errors import EngineError
from zerostart.layout import Layout, replicated
from zerostart.upstream.deepspeed_editing import has_own_values

__all__ = ["first_rank_shard", "found_shards", "whole_shard", "with_whole"]


def found_shards(model: nn.Module, world: World) -> dict[str, Shard]:
    """The shards in which any engine holds parameters of ``model``, by name, aliases included."""
    found: dict[str, Shard] = {}
    for name in engine_names():
        found.update(family_of(name).found(model, world))
    return found


def with_whole(model: nn.Module, shards: Mapping[str, Shard], world: World) -> dict[str, Shard]:
    """``shards`` and, as shards too, the parameters and buffers that every rank has whole.

    Raises EngineError for experts that have other values under one name on other ranks.
    """
    every = dict(shards)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in every:
            if has_own_values(parameter):
                raise EngineError(
                    f"{name} is of an expert of DeepSpeed's MoE, and other ranks have other experts under "
                    "that name: it cannot be saved as one tensor; use DeepSpeed's save_checkpoint"
                )
            every[name] = whole_shard(name, parameter, world)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        every[name] = whole_shard(name, buffer, world)
    return every


def whole_shard(name: str, tensor: torch.Tensor, world: World) -> Shard:
    """A tensor that every rank has whole, as a share of which there are as many holders."""
    layout = replicated(tuple(tensor.shape))
    return Shard(name, layout, tensor.detach().reshape(-1), lambda _: layout, (world.rank, world.size))


def first_rank_shard(name: str, tensor: torch.Tensor, world: World) -> Shard:
    """A tensor of which every rank has one, maybe with other values: the first rank's counts."""
    shard = whole_shard(name, tensor, world)
    layout = shard.layout if world.rank == 0 else Layout(shard.layout.shape, 0, 0, ())
    return replace(shard, layout=layout, held=(0, 1))
