"""A rank's share of a tensor: its local storage with a layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from zerostart.distributed.world import World
from zerostart.errors import ConfigError
from zerostart.geometry import Box
from zerostart.geometry.layout import Layout, LocalBox, replicated


@dataclass(frozen=True)
class Shard:
    """Part of the parameter ``name`` on one rank."""

    name: str
    layout: Layout
    #: 1-D tensor with ``layout.numel`` elements.
    storage: torch.Tensor
    #: Function from a rank to its layout; replicas have equal layouts.
    at: Callable[[int], Layout]
    #: Index of this rank among its replicas, and their number. Replicas divide work that is needed only once,
    #: such as writing.
    replica: tuple[int, int] = (0, 1)
    #: Layout of the rank's final tensor if the shard is only the part that it reads; otherwise None.
    local: Layout | None = None
    #: Like ``replica``, for the part of the shard that the rank's optimizer updates.
    optimizer_replica: tuple[int, int] = (0, 1)


def replace_everywhere(model: nn.Module, new: dict[int, nn.Parameter]) -> None:
    """Replace parameters (by ``id``) in every module that holds them."""
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in new:
                module._parameters[leaf] = new[id(parameter)]


def whole_shard(name: str, tensor: torch.Tensor, world: World) -> Shard:
    """Return a shard of a tensor that is whole on every rank.

    The storage is the tensor's memory, in its order (``channels_last``, a transposed or a sliced view). A
    tensor whose elements share memory is copied. Raises ConfigError for a tensor that is not dense.
    """
    layout, storage = _view_memory(name, tensor.detach())
    return Shard(name, layout, storage, lambda _: layout, (world.rank, world.size))


def replace_storage(shard: Shard, tensor: torch.Tensor) -> Shard:
    """Return ``shard``, of a whole tensor, with ``tensor`` as its storage.

    Raises ConfigError for a tensor that is not dense.
    """
    layout, storage = _view_memory(shard.name, tensor.detach())
    return replace(shard, layout=layout, storage=storage, at=lambda _: layout)


def check_own_memory(name: str, tensor: torch.Tensor) -> None:
    """Raise ConfigError for a tensor that is not dense, or whose elements share memory.

    Such a tensor can be read, but not written.
    """
    _check_dense(name, tensor)
    if not _has_own_memory(tensor):
        raise ConfigError(
            f"{name} is an expanded, conjugate or negative view, which cannot be restored: replace it "
            "with a copy (clone(), resolve_conj()) before training"
        )


def _check_dense(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise ConfigError(
            f"{name} is not a dense tensor ({'nested' if tensor.is_nested else tensor.layout}), and cannot "
            "be saved or restored; convert it (to_dense())"
        )


def _has_own_memory(tensor: torch.Tensor) -> bool:
    if tensor.is_conj() or tensor.is_neg():
        return False
    span = 1
    # From the smallest stride on: each stride must exceed the span of the dimensions before it.
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < span:
                return False
            span = stride * (size - 1) + span
    return True


def _view_memory(name: str, tensor: torch.Tensor) -> tuple[Layout, torch.Tensor]:
    _check_dense(name, tensor)
    if not _has_own_memory(tensor):
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    shape = tuple(tensor.shape)
    if tensor.is_contiguous():
        return replicated(shape), tensor.view(-1)
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, tensor.stride(), strict=True))
    # Elements in gaps may belong to another tensor, so the layout covers the whole span.
    layout = Layout(shape, span, span, (LocalBox(Box((0,) * len(shape), shape), 0, tensor.stride()),))
    return layout, tensor.as_strided((span,), (1,))


def first_rank_shard(name: str, tensor: torch.Tensor, world: World) -> Shard:
    """Return rank 0's shard of a tensor that may differ between ranks.

    Raises ConfigError as ``whole_shard`` does.
    """
    shard = whole_shard(name, tensor, world)
    layout = shard.layout if world.rank == 0 else Layout(shard.layout.shape, 0, 0, ())
    return replace(shard, layout=layout, replica=(0, 1))


def full_shape(parameter: torch.Tensor) -> torch.Size:
    """Return the unsharded shape of a parameter.

    It is the shape of a DTensor, and the attribute ``ds_shape`` of an empty placeholder of ZeRO-3.
    """
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


# Names of parameters at the load, without the parts that wrappers have added since.

#: Attributes in which torch.compile, activation checkpointing and PEFT's layers keep a wrapped module.
_WRAPPED = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "base_layer"})


def plain_name(name: str) -> str:
    """Return ``name`` without the parts that wrappers of the model have added.

    A wrapper of PEFT inside another keeps its part: both have adapters of the same names.
    """
    parts = name.split(".")
    inner = zip(parts, (*parts[1:], ""), strict=True)
    return ".".join(p for p, after in inner if p not in _WRAPPED or after.startswith("lora_"))


def loaded_names(model: nn.Module) -> dict[str, str]:
    """Map each parameter name, aliases included, to the first name of its parameter."""
    first: dict[int, str] = {}
    return {
        alias: plain_name(first.setdefault(id(parameter), alias))
        for alias, parameter in model.named_parameters(remove_duplicate=False)
    }
