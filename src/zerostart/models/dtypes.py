"""The dtypes of a model's tensors on meta, before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from zerostart.models.library import Built
from zerostart.models.tensors import recast, replace_tensor, state_names


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


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Give every floating parameter, on meta, the dtype that an engine would cast all of them to."""
    changed: dict[int, torch.Tensor] = {}
    for name, old in list(model.named_parameters(remove_duplicate=False)):
        if old.dtype.is_floating_point and old.dtype != dtype:
            if id(old) not in changed:
                changed[id(old)] = recast(old, dtype)
            replace_tensor(model, name, changed[id(old)])


def let_cast(
    built: Built, computing: torch.dtype, masters: bool, note: Callable[[nn.Parameter, torch.dtype], None]
) -> None:
    """Tell, through ``note``, which parameters an engine may cast to ``computing`` when it computes.

    That is all but those that the constructor made in a dtype of their own, or that the model keeps in
    another one when it is loaded in ``computing``. With ``masters`` those that are to be in ``computing`` are
    put in fp32 instead, as masters of the engine's casts.
    """
    kept = built.library.dtype_plan(built.model, computing)
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
