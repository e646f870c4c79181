"""One operator on symbolic tensors: a view, a write, or a new tensor, as torch's schema of it says.

Tensors with elements may be among the operands: constants, which a converter made itself and which are
symbolic too, and tensors from outside. What is made of these alone is made by torch itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch

from zerostart.geometry import row_major_strides
from zerostart.recipe.memory import Memory
from zerostart.recipe.operators import cast
from zerostart.recipe.overlaps import reads_what_it_writes
from zerostart.recipe.refusals import by_torch, ours_are_refused, refusal
from zerostart.recipe.strides import as_on_cpu
from zerostart.recipe.values import HANDLERS, Value, compute, constant, depends_on_values, names_of
from zerostart.recipe.views import KNOWN_VIEWS, SAME, Layout, Step, single_views, straight, strided_step
from zerostart.upstream.torch_wrapper import resizable, shares_storage

__all__ = ["record"]

aten = torch.ops.aten
#: Views of an operand, though their schemas do not say so.
_UNSAID_VIEWS = {
    aten._unsafe_view.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
}
#: Writes that give every element the same.
_FILLS = {aten.fill.Scalar, aten.fill.Tensor, aten.zero.default}
_DEPENDS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEXED = {
    *(aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default, aten.index_put_.default),
    *(aten._index_put_impl_.default, aten._unsafe_index_put.default),
}


@ours_are_refused
def record(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``func`` gives, as tensors of the class ``cls``.

    Raises ConversionError for what no trace can follow, and torch's own errors where torch does not accept
    the call: all others come from us, and a converter that catches them would go on otherwise than eagerly.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):  # a view made there would not fit a tensor that was not
            return _recorded(cls, func, args, kwargs)
    return _recorded(cls, func, args, kwargs)


def _recorded(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = list(_tensors((args, kwargs.values())))
    if all(not isinstance(t, cls) for t in tensors):
        return _from_outside(cls, func, args, kwargs, tensors)
    if _writes(func):
        return _write(cls, func, args, kwargs)
    if _is_view(func):
        return _view(cls, func, args, kwargs)
    return _make(cls, func, args, kwargs, tensors)


@functools.cache
def _writes(func: Any) -> bool:
    return bool(func._schema.is_mutable)


@functools.cache
def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return func in _UNSAID_VIEWS or (bool(returns) and returns[0].alias_info is not None)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)) or type(value) is type({}.values()):
            yield from _tensors(value)


def _mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """``value`` with its tensors changed, those in lists and dictionaries too."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(inner, change) for inner in value)
    if isinstance(value, dict):
        return {key: _mapped(inner, change) for key, inner in value.items()}
    return value


# Constants.


def _from_outside(cls: Any, func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """An operator on tensors with elements alone, or on none; what it newly makes is a constant."""
    if not tensors and (fill := _fill_of(func, args)) is not None:
        device = kwargs.get("device")
        if device is None or torch.device(device).type == "cpu":
            like = func(*args, **{**kwargs, "device": "meta", "pin_memory": None})
            return cls(Memory.filled(like, torch.full((), fill, dtype=like.dtype, device="cpu")))
    with by_torch():
        made = func(*args, **kwargs)
    if func is not aten.lift_fresh.default and (_writes(func) or _is_view(func)):
        return made
    return _mapped(made, functools.partial(_constant, cls))


def _constant(cls: Any, real: torch.Tensor) -> Any:
    """A tensor that torch made as a constant; one without elements as it is."""
    if real.device.type == "meta" or real.layout != torch.strided:
        return real
    real = real.detach().cpu()
    memory = Memory.of_constant(real.resolve_conj().resolve_neg())
    memory.exported = not resizable(real)
    return cls(memory)


def _fill_of(func: Any, args: Sequence[Any]) -> Any:
    """The one element that a factory fills a tensor with; None for any other operator."""
    name = func._schema.name.removeprefix("aten::").removeprefix("new_").removesuffix("_like")
    if name == "full":
        return args[2] if func._schema.name == "aten::new_full" else args[1]
    return {"empty": 0, "empty_strided": 0, "new_empty_strided": 0, "zeros": 0, "ones": 1}.get(name)


def _reals(cls: Any, values: Any) -> Any:
    """Arguments with the elements of constants."""
    return _mapped(values, lambda t: t.elements if isinstance(t, cls) else t)


def _all_constant(cls: Any, tensors: Sequence[Any]) -> bool:
    return all(not isinstance(t, cls) or t.memory.is_constant for t in tensors)


# The twins on the meta device, and values.


def _on_meta(cls: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """What torch's meta kernel gives: shapes, strides, dtypes, and the errors of wrong ones."""

    def twin(t: Any) -> torch.Tensor:
        if isinstance(t, cls):
            found: torch.Tensor = t.meta
            return found
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")

    if torch.Tag.data_dependent_output in func.tags or func._schema.name.startswith("aten::quantize"):
        raise depends_on_values(func, args, list(kwargs.values()))
    twins, named = _mapped(args, twin), _mapped(kwargs, twin)
    if named.get("device") is not None:
        named["device"] = torch.device("meta")
    with by_torch():
        try:
            made = func(*twins, **named)
        except RuntimeError as error:
            if _DEPENDS & set(func.tags):
                raise depends_on_values(func, args) from error
            if isinstance(error, NotImplementedError):
                raise refusal(
                    f"the conversion of {names_of(args)} calls {func}, and torch cannot tell "
                    f"without values what comes of it: {error}"
                ) from error
            raise
    return as_on_cpu(func, twins, named, made)


def _values(cls: Any, values: Any) -> Any:
    def valued(t: torch.Tensor) -> Value:
        if isinstance(t, cls):
            found: Value = t.value
            return found
        if t.device.type == "meta":
            raise refusal(
                "a conversion takes a tensor that is on the meta device, and has no elements; make it with "
                'device="cpu"'
            )
        return constant(t.detach().clone()).lying(t.stride())

    return _mapped(values, valued)


def _counted(cls: Any, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of an indexing operator with the masks among constant indices as the numbers of rows."""
    if func not in _INDEXED:
        return args
    indices: list[Any] = []
    for index in args[1]:
        masks = isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
        if masks and _all_constant(cls, [index]):
            real = _reals(cls, index)
            indices += [_constant(cls, rows) for rows in real.nonzero(as_tuple=True)]
        else:
            indices.append(index)
    return (args[0], indices, *args[2:])


def _make(cls: Any, func: Any, args: Any, kwargs: Any, tensors: Sequence[Any]) -> Any:
    """An operator that makes new tensors."""
    if func is aten.is_set_to.default:
        a, b = args
        return a.memory is b.memory and a.layout_in_memory == b.layout_in_memory
    fill = _fill_of(func, args)
    if fill is None and _all_constant(cls, tensors):
        with by_torch():
            made = func(*_reals(cls, args), **_reals(cls, kwargs))
        return _mapped(made, functools.partial(_constant, cls))
    args = _counted(cls, func, args)
    metas = _stack_meta(func, args)
    if metas is None:
        metas = _on_meta(cls, func, args, kwargs)
    if fill is not None:
        return cls(Memory.filled(metas, torch.full((), fill, dtype=metas.dtype, device="cpu")))
    if torch.device(kwargs.get("device") or "cpu").type == "meta":
        return metas
    if not any(True for _ in _tensors([metas])):
        if isinstance(metas, bool) or func is aten.is_pinned.default:
            return metas
        raise depends_on_values(func, args)
    values = _valued(cls, func, args, kwargs, metas)
    if isinstance(metas, torch.Tensor):
        return _fresh(cls, values, metas)
    return type(metas)(_fresh(cls, v, m) for v, m in zip(values, metas, strict=True))


def _valued(cls: Any, func: Any, args: Any, kwargs: Any, metas: Any) -> Any:
    """The values that an operator gives."""
    handler = HANDLERS.get(func)
    args, kwargs = _values(cls, args), _values(cls, kwargs)
    if handler is None:
        return compute(func, args, kwargs, metas)
    return handler(*args, **kwargs)


def _fresh(cls: Any, value: Value, meta: torch.Tensor) -> Any:
    if value.shape != tuple(meta.shape) or value.dtype != meta.dtype:
        raise refusal(
            f"a conversion of {names_of(value)} gave {value.dtype} {list(value.shape)} in the trace, and "
            f"{meta.dtype} {list(meta.shape)} in torch"
        )
    return cls(Memory.holding(value, meta.stride()), (), meta)


def _stack_meta(func: Any, args: Any) -> torch.Tensor | None:
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


# Views.


def _view(cls: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """An operator that shows the same memory in another way."""
    source, rest = args[0], args[1:]
    metas = _on_meta(cls, func, args, kwargs)
    if isinstance(metas, torch.Tensor) and func not in _UNSAID_VIEWS:
        return _viewed(cls, source, func, rest, metas)
    if isinstance(metas, torch.Tensor):
        metas = [metas]
    singles = single_views(func, source.shape, rest)
    if len(singles) != len(metas):
        singles = [(None, ())] * len(metas)
    views = [_viewed(cls, source, f, r, m) for (f, r), m in zip(singles, metas, strict=True)]
    return views[0] if func is aten._unsafe_view.default else views


def _viewed(cls: Any, source: Any, func: Any, rest: tuple[Any, ...], meta: torch.Tensor) -> Any:
    layout = Layout(tuple(meta.shape), meta.stride(), int(meta.storage_offset()))
    if func in SAME:
        return cls(source.memory, source.steps, meta)
    if func in KNOWN_VIEWS:
        return cls(source.memory, (*source.steps, Step(func, rest, layout, meta.dtype)), meta)
    if meta.dtype != source.dtype or not shares_storage(meta, source.meta):
        raise refusal(f"the conversion of {names_of(source)} calls {func}, a view that is not known here")
    steps = (*source.steps, strided_step(source.memory.layout, layout, meta.dtype))
    return cls(source.memory, straight(steps, source.memory.layout), meta)


# Writes.


def _write(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator that writes into tensors."""
    if func is aten.copy_.default and args[0] is args[1]:
        return args[0]
    if torch.Tag.inplace_view in func.tags:
        return _view_in_place(cls, func, args, kwargs)
    tensors = list(_tensors((args, kwargs.values())))
    written = _written(func, args, kwargs)
    if _all_constant(cls, tensors):
        with by_torch():
            func(*_reals(cls, args), **_reals(cls, kwargs))
        for target in written:
            if isinstance(target, cls):
                target.memory.touch()
        return _given_back(func, args, kwargs)
    outside = [t for t in written if not isinstance(t, cls)]
    if outside:
        raise refusal(
            f"the conversion of {names_of(args)} writes them into a tensor that it did not make with torch "
            f"while it ran ({func}): one from NumPy, from a global variable, or from another thread"
        )
    functional = _functional(func)
    if functional is None:
        raise refusal(f"the conversion of {names_of(args)} calls {func}, a write that cannot be followed")
    args = _counted(cls, func, args)
    kept = {k: v for k, v in kwargs.items() if not _is_out(func, k)}
    _on_meta(cls, func, args, kwargs)
    if functional not in _FILLS and any(t.layout_in_memory.overlaps() for t in written):
        raise refusal(
            f"the conversion of {names_of(args)} writes into a view whose elements share memory ({func}); "
            "write into the tensor that it is a view of, or clone it"
        )
    if _goes_along(functional) and reads_what_it_writes(written, [*args, *kept.values()]):
        raise refusal(
            f"the conversion of {names_of(args)} reads memory that it writes into at other places ({func}), "
            "where torch's result depends on its loops; clone the one or the other"
        )
    handler = HANDLERS.get(functional)
    values, named = _values(cls, args), _values(cls, kept)
    made = handler(*values, **named) if handler else compute(functional, values, named)
    for target, value in zip(written, [made] if isinstance(made, Value) else made, strict=True):
        if value.shape != tuple(target.shape) and not target.numel():
            target.become(cls(Memory.holding(value)))  # an empty tensor for a result of any shape
            continue
        if value.shape != tuple(target.shape):
            raise refusal(f"the conversion of {names_of(value)} calls {func} with an output of another shape")
        target.write(cast(value, target.dtype))
    return _given_back(func, args, kwargs)


@functools.cache
def _goes_along(functional: Any) -> bool:
    """Whether an operator reads its operands while it writes, element by element or tensor by tensor."""
    if torch.Tag.pointwise in functional.tags or functional is aten.copy.default:
        return True
    return bool(functional._schema.name.startswith("aten::_foreach"))


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that an operator writes into."""
    found: list[Any] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            found += _tensors([given])
    return found


def _given_back(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What an operator that writes returns: the tensors that it wrote into."""
    returns = func._schema.returns
    written = _written(func, args, kwargs)
    if not returns:
        return None
    return written[0] if len(returns) == 1 and len(written) == 1 else tuple(written)


def _is_out(func: Any, name: str) -> bool:
    return any(a.name == name and a.is_out for a in func._schema.arguments)


@functools.cache
def _functional(func: Any) -> Any:
    """The operator that gives as new tensors what ``func`` writes; None if torch has none."""
    space, name = func._schema.name.split("::")
    if name.startswith("__i"):
        name = "__" + name.removeprefix("__i")
    elif name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments if not a.is_out]
    packet = getattr(getattr(torch.ops, space), name, None)
    for overload in packet.overloads() if packet is not None else ():
        found = getattr(packet, overload)
        given = [(a.name, str(a.type)) for a in found._schema.arguments]
        if not found._schema.is_mutable and given == wanted:
            return found
    return None


def _view_in_place(cls: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """An operator that makes a tensor another view of its memory, such as ``t_``."""
    target = args[0]
    if func is aten.set_.source_Tensor and _settable(cls, target, args[1]):
        target.become(args[1].detach())
        return target
    if func is aten.resize_.default and (resized := _resized(target, args[1])) is not None:
        target.become(resized)
        return target
    if func._schema.name == "aten::set_" and isinstance(args[1], torch.UntypedStorage):
        real = torch.empty(0, dtype=target.dtype, device="cpu")
        memory = Memory.of_constant(func(real, *args[1:], **kwargs))
        memory.exported = True  # a file that is read has others in it
        target.become(cls(memory))
        return target
    functional = _functional(func)
    if functional is None or not isinstance(target, cls) or not _is_view(functional):
        raise refusal(
            f"the conversion of {names_of(args)} calls {func}, which gives a tensor other memory; "
            "make a new tensor"
        )
    target.become(_view(cls, functional, args, kwargs))
    return target


def _resized(target: Any, shape: Sequence[int]) -> Any:
    """What ``resize_`` makes of a tensor whose memory is large enough; None for any other."""
    if tuple(shape) == tuple(target.shape):
        return target.detach()
    room = prod(target.memory.layout.shape)
    first = target.storage_offset() - target.memory.layout.offset
    if first + prod(shape) <= room and not any(step.reads_anew for step in target.steps):
        return target.as_strided(shape, row_major_strides(shape))
    return target.new_empty(shape) if not room else None


def _settable(cls: Any, target: Any, source: Any) -> bool:
    """Whether ``set_`` makes one the other: a conjugate or negative bit would stay with the target."""
    both = (target, source)
    return all(isinstance(t, cls) and not t.is_conj() and not t.is_neg() for t in both)
