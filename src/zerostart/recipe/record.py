"""One operator on symbolic tensors: a view, a write, or a new tensor, as torch's schema of it says.

Tensors with elements may be among the operands; what is made of these alone is made by torch itself.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from zerostart.recipe.in_place import view, write
from zerostart.recipe.memory import Memory, Symbol
from zerostart.recipe.operands import (
    all_constant,
    constant_of,
    counted,
    fill_of,
    is_view,
    mapped,
    on_meta,
    reals,
    tensors_in,
    valued,
    writes,
)
from zerostart.recipe.refusals import by_torch, ours_are_refused, refusal
from zerostart.recipe.values import HANDLERS, Value, compute, depends_on_values, names_of
from zerostart.upstream.types import Arguments, Keywords

aten = torch.ops.aten


@ours_are_refused
def record(cls: type[Symbol], func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """What ``func`` gives, as tensors of the class ``cls``.

    Raises ConversionError for what no trace can follow, and torch's own errors where torch does not accept
    the call: all others come from us, and a converter that catches them would go on otherwise than eagerly.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):  # a view made there would not fit a tensor that was not
            return _recorded(cls, func, args, kwargs)
    return _recorded(cls, func, args, kwargs)


def _recorded(cls: type[Symbol], func: OpOverload, args: Arguments, kwargs: Keywords) -> object:
    # The order of the questions matters: an operator that writes (`add_`) also returns an alias of what it
    # wrote, so that it would pass for a view.
    tensors = list(tensors_in((args, kwargs.values())))
    if all(not isinstance(t, cls) for t in tensors):
        return _from_outside(cls, func, args, kwargs, tensors)
    if writes(func):
        return write(cls, func, args, kwargs)
    if is_view(func):
        return view(cls, func, args, kwargs)
    return _make(cls, func, args, kwargs, tensors)


def _from_outside(
    cls: type[Symbol], func: OpOverload, args: Arguments, kwargs: Keywords, tensors: Sequence[torch.Tensor]
) -> object:
    """An operator on tensors with elements alone, or on none; what it newly makes is a constant."""
    # Zeros, ones and the like take no memory until somebody asks for their elements: converters make tensors
    # as large as a model's embedding only to write weights into them.
    if not tensors and (fill := fill_of(func, args)) is not None:
        device = kwargs.get("device")
        if device is None or torch.device(device).type == "cpu":
            like = func(*args, **{**kwargs, "device": "meta", "pin_memory": None})
            return cls(Memory.filled(like, torch.full((), fill, dtype=like.dtype, device="cpu")))
    with by_torch():
        made = func(*args, **kwargs)
    # It is somebody else's memory still: as a symbolic constant it would be a copy.
    if func is not aten.lift_fresh.default and (writes(func) or is_view(func)):
        return made
    return mapped(made, functools.partial(constant_of, cls))


def _make(
    cls: type[Symbol], func: OpOverload, args: Arguments, kwargs: Keywords, tensors: Sequence[Any]
) -> Any:
    """An operator that makes new tensors."""
    if func is aten.is_set_to.default:
        a, b = args
        return a.memory is b.memory and a.layout_in_memory == b.layout_in_memory
    fill = fill_of(func, args)
    if fill is None and all_constant(cls, tensors):
        with by_torch():
            made = func(*reals(cls, args), **reals(cls, kwargs))
        return mapped(made, functools.partial(constant_of, cls))
    # From here on weights are among the operands. Masks that are constants are indices by then, since torch's
    # meta kernel cannot count what is true in them.
    args = counted(cls, func, args)
    metas = _stack_meta(func, args)
    if metas is None:
        metas = on_meta(cls, func, args, kwargs)
    if fill is not None:
        return cls(Memory.filled(metas, torch.full((), fill, dtype=metas.dtype, device="cpu")))
    if torch.device(kwargs.get("device") or "cpu").type == "meta":
        return metas
    # A number or a truth value out of weights: only one that does not depend on their elements can be given.
    if not any(True for _ in tensors_in([metas])):
        if isinstance(metas, bool) or func is aten.is_pinned.default:
            return metas
        raise depends_on_values(func, args)
    values = _valued(cls, func, args, kwargs, metas)
    if isinstance(metas, torch.Tensor):
        return _fresh(cls, values, metas)
    return type(metas)(_fresh(cls, v, m) for v, m in zip(values, metas, strict=True))


def _valued(cls: type[Symbol], func: OpOverload, args: Arguments, kwargs: Keywords, metas: Any) -> Any:
    """The values that an operator gives."""
    handler = HANDLERS.get(func)
    args, kwargs = valued(cls, args), valued(cls, kwargs)
    if handler is None:
        return compute(func, args, kwargs, metas)
    return handler(*args, **kwargs)


def _fresh(cls: type[Symbol], value: Value, meta: torch.Tensor) -> Any:
    if value.shape != tuple(meta.shape) or value.dtype != meta.dtype:
        raise refusal(
            f"a conversion of {names_of(value)} gave {value.dtype} {list(value.shape)} in the "
            f"trace, but {meta.dtype} {list(meta.shape)} in torch; this is a bug in zerostart"
        )
    # In the strides that torch gives: what a converter asks for, and what views of it show, depends on them.
    return cls(Memory.holding(value, meta.stride()), (), meta)


def _stack_meta(func: OpOverload, args: Arguments) -> torch.Tensor | None:
    """The twin of a stack of contiguous tensors, by hundreds of them faster than torch's own."""
    if func is not aten.stack.default:
        return None
    tensors, dim = args[0], args[1] if len(args) > 1 else 0
    first = tensors[0]
    if any(t.shape != first.shape or t.dtype != first.dtype or not t.is_contiguous() for t in tensors):
        return None
    if not -first.dim() - 1 <= dim <= first.dim():
        return None
    shape = list(first.shape)
    shape.insert(dim % (first.dim() + 1), len(tensors))
    return torch.empty(shape, dtype=first.dtype, device="meta")
