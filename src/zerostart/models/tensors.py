"""A model's tensors, by name: what is to be sharded, what is copied to every rank, what is tied."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import torch
from torch import nn

from zerostart.models.build import Built
from zerostart.recipe import Target
from zerostart.upstream.diffusers import is_diffusers, kept_in_fp32
from zerostart.upstream.transformers import dtype_plan, is_pretrained

__all__ = [
    "expectations",
    "let_cast",
    "owner_of",
    "recast",
    "replace_tensor",
    "set_dtypes",
    "state_names",
]


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds the tensor ``name``, and its name there."""
    path, _, leaf = name.rpartition(".")
    return (model.get_submodule(path) if path else model), leaf


def replace_tensor(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Put ``tensor`` in the place of the parameter or buffer ``name``, past the setters."""
    owner, leaf = owner_of(model, name)
    if leaf in owner._parameters:
        owner._parameters[leaf] = tensor  # type: ignore[assignment]  # a Parameter, by the caller's care
    elif leaf in owner._buffers:
        owner._buffers[leaf] = tensor
    else:
        raise KeyError(name)


def state_names(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """``(name, tensor, is a buffer)`` of the state dict, tied names included, in its order."""
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                yield start + leaf, parameter, False
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf not in module._non_persistent_buffers_set:
                yield start + leaf, buffer, True


def expectations(built: Built) -> dict[str, Target]:
    """What each state-dict name of the model expects of the checkpoint."""
    kept: list[tuple[re.Pattern[str], torch.dtype]] = []
    if built.dtype is not None and is_pretrained(built.model):
        kept = dtype_plan(built.model, built.dtype)
    if is_diffusers(built.model):
        return _diffusers_expectations(built)
    targets: dict[str, Target] = {}
    for name, tensor, buffer in state_names(built.model):
        dtype = next((other for pattern, other in kept if pattern.search(name)), tensor.dtype)
        targets[name] = Target(name, tuple(tensor.shape), dtype, buffer, built.dtype is None)
    return targets


def _diffusers_expectations(built: Built) -> dict[str, Target]:
    """As ``ModelMixin.from_pretrained`` casts: what it keeps in float32, and all else to the one dtype.

    Without one, all else is as the checkpoint stores it.
    """
    kept = kept_in_fp32(built.model)
    targets: dict[str, Target] = {}
    for name, tensor, buffer in state_names(built.model):
        dtype, as_stored = tensor.dtype, False
        if dtype.is_floating_point:
            if not kept.isdisjoint(name.split(".")):
                dtype = torch.float32
            elif built.dtype is None:
                as_stored = True
            else:
                dtype = built.dtype
        targets[name] = Target(name, tuple(tensor.shape), dtype, buffer, as_stored)
    return targets


def set_dtypes(built: Built, stored: dict[str, torch.dtype]) -> None:
    """Give the meta tensors their final dtypes, before anything is allocated.

    With a dtype for the whole model, every floating tensor in the model's main dtype changes to it; one
    that the constructor made in another dtype on purpose keeps it. Without one (a plain module), each
    tensor takes the dtype in which the checkpoint stores it.
    """
    model = built.model
    floating = [p.dtype for p in model.parameters() if p.dtype.is_floating_point]
    main = floating[0] if floating else None
    changed: dict[int, torch.Tensor] = {}
    for name, tensor, _ in list(state_names(model)):
        want = built.dtype if built.dtype is not None and tensor.dtype == main else tensor.dtype
        if built.dtype is None and tensor.dtype.is_floating_point:
            want = stored.get(name, tensor.dtype)
        if want == tensor.dtype or tensor.device.type != "meta":
            continue
        if id(tensor) not in changed:
            changed[id(tensor)] = recast(tensor, want)
        replace_tensor(model, name, changed[id(tensor)])


def let_cast(
    built: Built, computing: torch.dtype, masters: bool, note: Callable[[nn.Parameter, torch.dtype], None]
) -> None:
    """Tell, through ``note``, which parameters an engine may cast to ``computing`` when it computes.

    That is all but those that the constructor made in a dtype of their own, or that the model keeps in
    another one when it is loaded in ``computing``. With ``masters`` those that are to be in ``computing`` are
    put in fp32 instead, as masters of the engine's casts.
    """
    kept = dtype_plan(built.model, computing) if is_pretrained(built.model) else []
    seen: dict[int, nn.Parameter] = {}
    for name, old in list(built.model.named_parameters(remove_duplicate=False)):
        own = built.dtype is not None and old.dtype != built.dtype
        if own or not old.dtype.is_floating_point or any(pattern.search(name) for pattern, _ in kept):
            continue
        if id(old) not in seen:
            new = recast(old, torch.float32) if masters and old.dtype == computing else old
            assert isinstance(new, nn.Parameter)
            note(new, computing)
            seen[id(old)] = new
        replace_tensor(built.model, name, seen[id(old)])


def recast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A meta tensor in another dtype; a parameter stays one, with its marks."""
    cast = torch.empty(tensor.shape, dtype=dtype, device="meta")
    if not isinstance(tensor, nn.Parameter):
        return cast
    parameter = nn.Parameter(cast, requires_grad=tensor.requires_grad and dtype.is_floating_point)
    parameter.__dict__.update(tensor.__dict__)
    return parameter
