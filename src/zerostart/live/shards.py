"""The shards of a live model, whichever engine holds it and whoever has loaded it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from zerostart.distributed.world import World
from zerostart.engines import Shard, engine_names, family_of, whole_shard
from zerostart.errors import EngineError
from zerostart.upstream.deepspeed.state.editing import has_own_values


def put_to_rest(model: nn.Module) -> None:
    """Have ``model`` hold its shards as its parameters, whichever engine a forward has left gathered.

    Before parameters are listed: by their objects nobody finds those of a moment ago.
    """
    for name in engine_names():
        family_of(name).put_to_rest(model)


def found_shards(model: nn.Module, world: World) -> dict[str, Shard]:
    """The shards in which any engine holds parameters of ``model``, by name, aliases included."""
    found: dict[str, Shard] = {}
    for name in engine_names():
        found.update(family_of(name).find_shards(model, world))
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
