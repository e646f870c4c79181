"""The shards of a live model, whichever engine holds it and whoever has loaded it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from zerostart.distributed.world import World
from zerostart.engines.registry import engine_names, family_of
from zerostart.engines.shard import Shard
from zerostart.errors import ConfigError, EngineError
from zerostart.geometry import Box
from zerostart.geometry.layout import Layout, Placed, replicated
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


def whole_shard(name: str, tensor: torch.Tensor, world: World) -> Shard:
    """A tensor that every rank has whole, as a share of which there are as many holders.

    The storage is the tensor's memory, in whatever order its elements lie there (``channels_last``, a
    transposed or a sliced view); a copy of what has not memory of its own for each element. Raises
    ConfigError for a tensor that is not dense.
    """
    layout, storage = _as_it_lies(name, tensor.detach())
    return Shard(name, layout, storage, lambda _: layout, (world.rank, world.size))


def laid_out(shard: Shard, tensor: torch.Tensor) -> Shard:
    """``shard``, of a whole tensor, with ``tensor`` of the same shape for its storage, as that lies.

    Raises ConfigError for a tensor that is not dense.
    """
    layout, storage = _as_it_lies(shard.name, tensor.detach())
    return replace(shard, layout=layout, storage=storage, at=lambda _: layout)


def check_own_memory(name: str, tensor: torch.Tensor) -> None:
    """Raise ConfigError for a tensor of which several elements are one (``expand``), or that is lazily one.

    Such a tensor can be read, and cannot be written to.
    """
    if not _has_own_memory(tensor):
        raise ConfigError(
            f"{name} is an expanded, conjugate or negative view, which cannot be restored: make it a tensor "
            "of its own (clone(), resolve_conj()) before training"
        )


def _has_own_memory(tensor: torch.Tensor) -> bool:
    if tensor.is_conj() or tensor.is_neg():
        return False
    span = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < span:
                return False
            span = stride * (size - 1) + span
    return True


def _as_it_lies(name: str, tensor: torch.Tensor) -> tuple[Layout, torch.Tensor]:
    """The layout of a whole tensor in its memory, and that as a row of elements."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise ConfigError(
            f"{name} is not a dense tensor ({'nested' if tensor.is_nested else tensor.layout}), and cannot "
            "be saved or restored; convert it (to_dense())"
        )
    if not _has_own_memory(tensor):
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    shape = tuple(tensor.shape)
    if tensor.is_contiguous():
        return replicated(shape), tensor.view(-1)
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, tensor.stride(), strict=True))
    # All of the span counts as real: what lies between may be another tensor's.
    layout = Layout(shape, span, span, (Placed(Box((0,) * len(shape), shape), 0, tensor.stride()),))
    return layout, tensor.as_strided((span,), (1,))


def first_rank_shard(name: str, tensor: torch.Tensor, world: World) -> Shard:
    """A tensor of which every rank has one, maybe with other values: the first rank's counts.

    Raises ConfigError as ``whole_shard`` does.
    """
    shard = whole_shard(name, tensor, world)
    layout = shard.layout if world.rank == 0 else Layout(shard.layout.shape, 0, 0, ())
    return replace(shard, layout=layout, held=(0, 1))
