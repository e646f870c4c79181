"""Run one operator on symbolic tensors: a view, a write or a new tensor.

Tensors with elements may be operands too. torch runs operators that have no other operands.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from zerostart import geometry
from zerostart.recipe.memory import (
    UNSAID_VIEWS,
    Memory,
    SymbolClass,
    are_constant,
    get_fill_value,
    is_view,
    is_write,
    iter_tensors,
    make_symbolic,
    map_tensors,
    number_masks,
    run_on_meta,
    take_elements,
    take_values,
)
from zerostart.recipe.operators import cast
from zerostart.recipe.refusals import allow_torch_errors, refusal, refuse_own_errors
from zerostart.recipe.values import HANDLERS, Value, compute, depends_on_values, list_names
from zerostart.recipe.views import KNOWN_VIEWS, SAME, StridedLayout, ViewOperation, single_views
from zerostart.upstream.torch.tensors import shares_storage
from zerostart.upstream.types import Arguments, Keywords

# Operators that return a view of memory or write into it.


def view(cls: SymbolClass, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """Follow an operator that returns a view.

    Raises ConversionError for an unknown view.
    """
    source, rest = args[0], args[1:]
    metas = run_on_meta(cls, func, args, kwargs)
    if isinstance(metas, torch.Tensor) and func not in UNSAID_VIEWS:
        return _make_view(cls, source, func, rest, metas)
    if isinstance(metas, torch.Tensor):
        metas = [metas]
    # Follow several results (split, unbind) as single views, which writes can go back through.
    singles = single_views(func, source.shape, rest)
    if len(singles) != len(metas):
        singles = [(None, ())] * len(metas)
    views = [_make_view(cls, source, f, r, m) for (f, r), m in zip(singles, metas, strict=True)]
    return views[0] if func is aten._unsafe_view.default else views


def _make_view(cls: SymbolClass, source: Any, func: OpOverload, more: Arguments, meta: torch.Tensor) -> Any:
    layout = StridedLayout(tuple(meta.shape), meta.stride(), int(meta.storage_offset()))
    if func in SAME:
        return cls(source.memory, source.steps, meta)
    if func in KNOWN_VIEWS:
        return cls(source.memory, (*source.steps, ViewOperation(func, more, layout)), meta)
    if meta.dtype != source.dtype or not shares_storage(meta, source.meta):
        raise refusal(
            f"the conversion of {list_names(source)} calls {func}, a view that zerostart does not support"
        )
    # No rule exists for this view: its strides on meta say which elements it shows, as for as_strided.
    result = None if any(step.reads_anew for step in source.steps) else box_view(cls(source.memory), layout)
    if result is None:
        raise refusal(
            f"the conversion of {list_names(source)} calls {func}, whose result is no box of the tensor's "
            "memory; use slices, permute and reshape, or clone the tensor first"
        )
    return result


def box_view(whole: Any, layout: StridedLayout) -> Any:
    """Express a view by known views; None if it is no box."""
    have = whole.layout_in_memory
    if have == layout:
        return whole
    steps = geometry.view_within(
        *(have.shape, have.strides, have.offset), *(layout.shape, layout.strides, layout.offset)
    )
    if steps is None:
        return None
    view = whole.permute(steps.order).view(steps.split)
    for dim, (start, count) in enumerate(zip(steps.starts, steps.counts, strict=True)):
        view = aten.slice.Tensor(view, dim, start, start + count)
    return view.view(steps.joined).permute(steps.permutation).view(steps.shape)


def write(cls: SymbolClass, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """Follow an operator that writes into tensors.

    Raises ConversionError if it cannot be followed.
    """
    if func is aten.copy_.default and args[0] is args[1]:
        return args[0]
    if torch.Tag.inplace_view in func.tags:
        return _view_in_place(cls, func, args, kwargs)
    # 1. torch writes into tensors without weights itself.
    tensors = list(iter_tensors((args, kwargs.values())))
    written = _find_targets(func, args, kwargs)
    if are_constant(cls, tensors):
        with allow_torch_errors():
            func(*take_elements(cls, args), **take_elements(cls, kwargs))
        for target in written:
            if isinstance(target, cls):
                target.memory.touch()
        return _get_returned(func, written)
    # 2. Weights written into memory that is not symbolic could not be followed further.
    outside = [t for t in written if not isinstance(t, cls)]
    if outside:
        raise refusal(
            f"the conversion of {list_names(args)} writes them ({func}) into a tensor that torch did "
            "not make during the conversion: one from NumPy, from a global variable, or from "
            "another thread"
        )
    # 3. Run the functional twin of the write (``add`` for ``add_``), and store its result in the target.
    functional = _find_functional(func)
    if functional is None:
        raise refusal(
            f"the conversion of {list_names(args)} calls {func}, a write in place that zerostart cannot trace"
        )
    # As in `record`, constant masks become indices.
    args = number_masks(cls, func, args)
    outs = {argument.name for argument in func._schema.arguments if argument.is_out}
    inputs = {k: v for k, v in kwargs.items() if k not in outs}
    # Check the call itself: an in-place operator refuses shapes and dtypes that the twin broadcasts.
    run_on_meta(cls, func, args, kwargs)  # raises torch's errors
    # 4. The twin reads everything before it writes; torch's loop does not. Refuse calls whose result depends
    # on that: several elements at one address, or an operand that overlaps the target.
    if any(t.layout_in_memory.overlaps() for t in written):
        raise refusal(
            f"the conversion of {list_names(args)} writes ({func}) into a view whose elements share "
            "memory; write into the tensor that it is a view of, or clone it"
        )
    if _is_elementwise(functional) and reads_what_it_writes(written, [*args, *inputs.values()]):
        raise refusal(
            f"the conversion of {list_names(args)} reads memory that it also writes to ({func}), so "
            "the result depends on the order of torch's loops; clone the source or the target"
        )
    # 5. Write each target, cast as torch casts. All views of its memory show the new version.
    handler = HANDLERS.get(functional)
    values, named = take_values(cls, args), take_values(cls, inputs)
    results = handler(*values, **named) if handler else compute(functional, values, named)
    for target, value in zip(written, [results] if isinstance(results, Value) else results, strict=True):
        if value.shape != tuple(target.shape) and not target.numel():
            target.become(cls(Memory.of_value(value)))  # an empty tensor takes a result of any shape
            continue
        if value.shape != tuple(target.shape):
            raise refusal(
                f"the conversion of {list_names(value)} calls {func} with an out= tensor of another shape"
            )
        target.write(cast(value, target.dtype))
    return _get_returned(func, written)


@functools.cache
def _is_elementwise(functional: OpOverload) -> bool:
    if torch.Tag.pointwise in functional.tags or functional is aten.copy.default:
        return True
    return bool(functional._schema.name.startswith("aten::_foreach"))


def _find_targets(func: OpOverload, args: Sequence[object], kwargs: Keywords) -> list[Any]:
    targets: list[Any] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            targets += iter_tensors([value])
    return targets


def _get_returned(func: OpOverload, written: list[Any]) -> Any:
    returns = len(func._schema.returns)
    return None if not returns else written[0] if returns == len(written) == 1 else tuple(written)


@functools.cache
def _find_functional(func: OpOverload) -> Any:
    """Return the operator without side effects, or None."""
    space, name = func._schema.name.split("::")
    if name.startswith("__i"):
        name = "__" + name.removeprefix("__i")
    elif name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    # torch does not record this relation, so compare names and arguments.
    signature = [(a.name, str(a.type)) for a in func._schema.arguments if not a.is_out]
    packet = getattr(getattr(torch.ops, space), name, None)
    for overload in packet.overloads() if packet is not None else ():
        overload_op = getattr(packet, overload)
        arguments = [(a.name, str(a.type)) for a in overload_op._schema.arguments]
        if not overload_op._schema.is_mutable and arguments == signature:
            return overload_op
    return None


def _view_in_place(cls: SymbolClass, func: OpOverload, args: Arguments, kwargs: Keywords) -> object:
    """Follow an operator that replaces a tensor's view, such as ``t_``."""
    target = args[0]
    if func._schema.name == "aten::set_" and isinstance(args[1], torch.UntypedStorage):
        real = torch.empty(0, dtype=target.dtype, device="cpu")
        memory = Memory.of_constant(func(real, *args[1:], **kwargs))
        # Exported memory is read again for each value, since other code may change it.
        memory.exported = True  # such as the memory of a file
        target.become(cls(memory))
        return target
    functional = _find_functional(func)
    if functional is None or not isinstance(target, cls) or not is_view(functional):
        raise refusal(
            f"the conversion of {list_names(args)} calls {func}, which gives a tensor other memory; "
            "make a new tensor instead"
        )
    target.become(view(cls, functional, args, kwargs))
    return target


def reads_what_it_writes(written: list[Any], arguments: list[object]) -> bool:
    """Return True if an operator overwrites elements of another operand.

    An operand may be the written tensor itself; in lists, the one at the same position.
    """
    for argument in arguments:
        operands = argument if isinstance(argument, (list, tuple)) else [argument]
        for place, operand in enumerate(operands):
            for number, target in enumerate(written):
                if operand is target and len(written) == 1:
                    continue
                if (
                    not isinstance(operand, torch.Tensor)
                    or getattr(operand, "memory", None) is not target.memory
                ):
                    continue
                # Equal views are read element by element before they are written.
                same = place == number and _are_equal_views(operand, target)
                if not same and not _are_disjoint(operand, target):
                    return True
    return False


def _are_equal_views(a: torch.Tensor, b: torch.Tensor) -> bool:
    places = [(t.shape, t.stride(), t.storage_offset(), t.dtype, t.is_conj(), t.is_neg()) for t in (a, b)]
    return places[0] == places[1]


def _are_disjoint(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.numel() or not b.numel():
        return True
    (first, stop), (other, end) = byte_span(a), byte_span(b)
    return stop <= other or end <= first


def byte_span(t: torch.Tensor) -> tuple[int, int]:
    """Return a tensor's first byte in its storage, and the byte after the last."""
    width, first = t.element_size(), int(t.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return first * width, (last + 1) * width


aten = torch.ops.aten


@refuse_own_errors
def record(cls: SymbolClass, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """Run ``func`` on tensors of the class ``cls``.

    Raises ConversionError for an operator that no trace can follow, and torch's own errors for a wrong call.
    All other errors become refusals, so that no converter catches them and continues differently from eager
    torch.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):  # its views would not fit other tensors
            return _dispatch(cls, func, args, kwargs)
    return _dispatch(cls, func, args, kwargs)


def _dispatch(cls: SymbolClass, func: OpOverload, args: Arguments, kwargs: Keywords) -> object:
    # Ask for writes first: an operator that writes (`add_`) also returns an alias.
    tensors = list(iter_tensors((args, kwargs.values())))
    if all(not isinstance(t, cls) for t in tensors):
        return _run_factory(cls, func, args, kwargs, tensors)
    if is_write(func):
        return write(cls, func, args, kwargs)
    if is_view(func):
        return view(cls, func, args, kwargs)
    return _run_on_symbols(cls, func, args, kwargs, tensors)


def _run_factory(
    cls: SymbolClass, func: OpOverload, args: Arguments, kwargs: Keywords, tensors: Sequence[torch.Tensor]
) -> object:
    # Defer zeros, ones and the like: converters make tensors as large as an embedding only to write weights
    # into them.
    if not tensors and (fill := get_fill_value(func, args)) is not None:
        device = kwargs.get("device")
        if device is None or torch.device(device).type == "cpu":
            like = func(*args, **{**kwargs, "device": "meta", "pin_memory": None})
            return cls(Memory.filled(like, torch.full((), fill, dtype=like.dtype, device="cpu")))
    with allow_torch_errors():
        result = func(*args, **kwargs)
    # Memory of other code: a symbolic constant would be a copy.
    if func is not aten.lift_fresh.default and (is_write(func) or is_view(func)):
        return result
    return map_tensors(result, functools.partial(make_symbolic, cls))


def _run_on_symbols(
    cls: SymbolClass, func: OpOverload, args: Arguments, kwargs: Keywords, tensors: Sequence[Any]
) -> Any:
    if func is aten.is_set_to.default:
        a, b = args
        return a.memory is b.memory and a.layout_in_memory == b.layout_in_memory
    fill = get_fill_value(func, args)
    if fill is None and are_constant(cls, tensors):
        with allow_torch_errors():
            result = func(*take_elements(cls, args), **take_elements(cls, kwargs))
        return map_tensors(result, functools.partial(make_symbolic, cls))
    # Some operands are weights from here on. Constant masks become indices, since torch's meta kernel cannot
    # count their true elements.
    args = number_masks(cls, func, args)
    metas = _stack_meta(func, args)
    if metas is None:
        metas = run_on_meta(cls, func, args, kwargs)
    if fill is not None:
        return cls(Memory.filled(metas, torch.full((), fill, dtype=metas.dtype, device="cpu")))
    if torch.device(kwargs.get("device") or "cpu").type == "meta":
        return metas
    # Numbers and truth values are known only if they do not depend on weights.
    if not any(True for _ in iter_tensors([metas])):
        if isinstance(metas, bool) or func is aten.is_pinned.default:
            return metas
        raise depends_on_values(func, args)
    handler, args, kwargs = HANDLERS.get(func), take_values(cls, args), take_values(cls, kwargs)
    values: Any = handler(*args, **kwargs) if handler else compute(func, args, kwargs, metas)
    if isinstance(metas, torch.Tensor):
        return _make_result(cls, values, metas)
    return type(metas)(_make_result(cls, v, m) for v, m in zip(values, metas, strict=True))


def _make_result(cls: SymbolClass, value: Value, meta: torch.Tensor) -> Any:
    if value.shape != tuple(meta.shape) or value.dtype != meta.dtype:
        raise refusal(
            f"a conversion of {list_names(value)} gave {value.dtype} {list(value.shape)} in the "
            f"trace, but {meta.dtype} {list(meta.shape)} in torch; this is a bug in zerostart"
        )
    # Use torch's strides: the converter may ask for them, and views depend on them.
    return cls(Memory.of_value(value, meta.stride()), (), meta)


def _stack_meta(func: OpOverload, args: Arguments) -> torch.Tensor | None:
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
