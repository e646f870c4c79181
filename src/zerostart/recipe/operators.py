"""The operators that move elements, each as what it does to pieces; importing this module registers them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeVar

import torch

from zerostart import geometry
from zerostart.recipe.computed import Computed
from zerostart.recipe.symbolic import HANDLERS, Handler, SymbolicTensor, compute, lifted

__all__: list[str] = []

aten = torch.ops.aten
H = TypeVar("H", bound=Handler)


def _handles(*operators: Any) -> Callable[[H], H]:
    def register(handler: H) -> H:
        for operator in operators:
            HANDLERS[operator] = handler
        return handler

    return register


def _dim(t: torch.Tensor, dim: int, extra: int = 0) -> int:
    rank = t.dim() + extra
    if not -rank <= dim < max(rank, 1):
        raise IndexError(f"dimension {dim} is out of range for {t.dim()} dimensions")
    return dim % rank if rank else 0


def _same(t: SymbolicTensor, pieces: Sequence[geometry.Piece], shape: Sequence[int]) -> SymbolicTensor:
    return SymbolicTensor(pieces, shape, t.dtype, t.stored)


@_handles(
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.contiguous.default,
    aten.lift_fresh.default,
    aten._conj.default,
)
def _identity(t: SymbolicTensor, **_: Any) -> SymbolicTensor:
    return _same(t, t.pieces, t.shape)


@_handles(aten._to_copy.default)
def cast(t: SymbolicTensor, dtype: torch.dtype | None = None, **_: Any) -> SymbolicTensor:
    """Note the cast; one that follows a cast which lost something has to be computed from that."""
    if dtype is None or dtype == t.dtype:
        return t
    if t.rounds(dtype):
        rounded: SymbolicTensor = compute(aten._to_copy.default, (t,), {"dtype": t.dtype})
        t = rounded
    return SymbolicTensor(t.pieces, t.shape, dtype, t.stored)


@_handles(aten.copy.default)
def _copy(to: SymbolicTensor, t: SymbolicTensor, non_blocking: bool = False) -> SymbolicTensor:
    return _expand(cast(t, to.dtype), to.shape)


@_handles(aten.copy_.default)
def _copy_back(to: SymbolicTensor, t: SymbolicTensor, non_blocking: bool = False) -> SymbolicTensor:
    # Functionalization gives an argument that was written into its new value at the end.
    made = _copy(to, t)
    to.pieces, to.stored = made.pieces, made.stored
    return to


@_handles(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(t: SymbolicTensor, size: Sequence[int]) -> SymbolicTensor:
    target = list(size)
    if -1 in target:
        known = prod(s for s in target if s != -1)
        target[target.index(-1)] = t.numel() // known if known else 0
    if prod(target) != t.numel():
        raise RuntimeError(f"shape {list(size)} is invalid for input of size {t.numel()}")
    return _same(t, geometry.reshape(t.pieces, t.shape, target), target)


@_handles(aten.permute.default)
def _permute(t: SymbolicTensor, dims: Sequence[int]) -> SymbolicTensor:
    order = [_dim(t, d) for d in dims]
    return _same(t, geometry.permute(t.pieces, order), [t.shape[d] for d in order])


@_handles(aten.transpose.int)
def _transpose(t: SymbolicTensor, dim0: int, dim1: int) -> SymbolicTensor:
    order = list(range(t.dim()))
    a, b = _dim(t, dim0), _dim(t, dim1)
    if order:
        order[a], order[b] = order[b], order[a]
    return _permute(t, order)


@_handles(aten.t.default)
def _t(t: SymbolicTensor) -> SymbolicTensor:
    return t if t.dim() < 2 else _transpose(t, 0, 1)


@_handles(aten.slice.Tensor)
def _slice(
    t: SymbolicTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> SymbolicTensor:
    dim = _dim(t, dim)
    kept = range(t.shape[dim])[slice(start, end, step)]
    shape = list(t.shape)
    shape[dim] = len(kept)
    return _same(t, geometry.crop(t.pieces, dim, kept.start, kept.stop, step), shape)


@_handles(aten.select.int)
def _select(t: SymbolicTensor, dim: int, index: int) -> SymbolicTensor:
    dim = _dim(t, dim)
    if not -t.shape[dim] <= index < t.shape[dim]:
        raise IndexError(f"index {index} is out of range for dimension {dim} of size {t.shape[dim]}")
    index %= t.shape[dim]
    return _squeeze_dims(_slice(t, dim, index, index + 1), [dim])


@_handles(aten.unsqueeze.default)
def _unsqueeze(t: SymbolicTensor, dim: int) -> SymbolicTensor:
    at = _dim(t, dim, extra=1)
    shape = [*t.shape[:at], 1, *t.shape[at:]]
    return _same(t, geometry.insert_axis(t.pieces, at), shape)


@_handles(aten.squeeze.dims)
def _squeeze_dims(t: SymbolicTensor, dims: Sequence[int]) -> SymbolicTensor:
    gone = {_dim(t, d) for d in dims}
    shape = [size for d, size in enumerate(t.shape) if not (d in gone and size == 1)]
    return _same(t, geometry.reshape(t.pieces, t.shape, shape), shape)


@_handles(aten.squeeze.default)
def _squeeze(t: SymbolicTensor) -> SymbolicTensor:
    return _squeeze_dims(t, range(t.dim()))


@_handles(aten.squeeze.dim)
def _squeeze_dim(t: SymbolicTensor, dim: int) -> SymbolicTensor:
    return _squeeze_dims(t, [dim] if t.dim() else [])


@_handles(aten.expand.default)
def _expand(t: SymbolicTensor, size: Sequence[int], *, implicit: bool = False) -> SymbolicTensor:
    lead = len(size) - t.dim()
    shape = [1] * lead + list(t.shape)
    target = [old if new == -1 else new for old, new in zip(shape, size, strict=True)]
    pieces = geometry.reshape(t.pieces, t.shape, shape)
    return _same(t, geometry.broadcast(pieces, shape, target), target)


@_handles(aten.repeat.default)
def _repeat(t: SymbolicTensor, repeats: Sequence[int]) -> SymbolicTensor:
    lead = len(repeats) - t.dim()
    result = _view(t, [1] * lead + list(t.shape)) if lead else t
    for dim, times in enumerate(repeats):
        if times != 1:
            result = _cat([result] * times, dim)
    return result


@_handles(aten.cat.default)
def _cat(tensors: Sequence[SymbolicTensor], dim: int = 0) -> SymbolicTensor:
    # Torch skips one-dimensional empty tensors here, for old code's sake.
    parts = [t for t in tensors if not (t.dim() == 1 and t.shape[0] == 0)] or list(tensors)
    dim = _dim(parts[0], dim)
    dtype = parts[0].dtype
    for t in parts[1:]:
        dtype = torch.promote_types(dtype, t.dtype)
        if t.shape[:dim] != parts[0].shape[:dim] or t.shape[dim + 1 :] != parts[0].shape[dim + 1 :]:
            raise RuntimeError(
                f"sizes of tensors must match except in dimension {dim}: "
                f"{[tuple(p.shape) for p in parts[:4]]}"
            )
    shape = list(parts[0].shape)
    shape[dim] = sum(t.shape[dim] for t in parts)
    parts = [t if t.dtype == dtype else cast(t, dtype) for t in parts]
    pieces = geometry.concatenate([(t.pieces, t.shape[dim]) for t in parts], dim)
    return SymbolicTensor(pieces, shape, dtype, _stored(parts))


@_handles(aten.stack.default)
def _stack(tensors: Sequence[SymbolicTensor], dim: int = 0) -> SymbolicTensor:
    size = tensors[0].shape
    if any(t.shape != size for t in tensors):
        raise RuntimeError(f"stack expects equal sizes: {[tuple(t.shape) for t in tensors[:4]]}")
    at = _dim(tensors[0], dim, extra=1)
    # Not by way of unsqueezed tensors: a stack of experts has hundreds, and each would be a tensor more.
    dtype = functools.reduce(torch.promote_types, {t.dtype for t in tensors})
    tensors = [t if t.dtype == dtype else cast(t, dtype) for t in tensors]
    pieces = geometry.stack([t.pieces for t in tensors], at)
    return SymbolicTensor(pieces, [*size[:at], len(tensors), *size[at:]], dtype, _stored(tensors))


def _stored(tensors: Sequence[SymbolicTensor]) -> frozenset[torch.dtype]:
    return frozenset().union(*{t.stored for t in tensors})


@_handles(aten.split_with_sizes.default)
def _split_sizes(t: SymbolicTensor, split_sizes: Sequence[int], dim: int = 0) -> list[SymbolicTensor]:
    dim = _dim(t, dim)
    if sum(split_sizes) != t.shape[dim]:
        raise RuntimeError(f"split sizes {list(split_sizes)} do not sum to {t.shape[dim]}")
    parts, at = [], 0
    for size in split_sizes:
        parts.append(_slice(t, dim, at, at + size))
        at += size
    return parts


@_handles(aten.split.Tensor)
def _split(t: SymbolicTensor, split_size: int, dim: int = 0) -> list[SymbolicTensor]:
    dim = _dim(t, dim)
    return [_slice(t, dim, at, at + split_size) for at in range(0, t.shape[dim], split_size)]


@_handles(aten.unbind.int)
def _unbind(t: SymbolicTensor, dim: int = 0) -> list[SymbolicTensor]:
    return [_select(t, dim, i) for i in range(t.shape[_dim(t, dim)])]


@_handles(aten.flip.default)
def _flip(t: SymbolicTensor, dims: Sequence[int]) -> SymbolicTensor:
    for dim in dims:
        rows = [_slice(t, dim, i, i + 1) for i in reversed(range(t.shape[_dim(t, dim)]))]
        t = _cat(rows, dim)
    return t


@_handles(aten.roll.default)
def _roll(t: SymbolicTensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> SymbolicTensor:
    if not dims:
        return _view(_roll(_view(t, [-1]), shifts, [0]), t.shape)
    for by, dim in zip(shifts, dims, strict=True):
        at = -by % t.shape[_dim(t, dim)]
        t = _cat([_slice(t, dim, at), _slice(t, dim, 0, at)], dim)
    return t


@_handles(aten.slice_scatter.default)
def _slice_scatter(
    t: SymbolicTensor,
    src: SymbolicTensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> SymbolicTensor:
    dim = _dim(t, dim)
    size = t.shape[dim]
    kept = range(size)[slice(start, end, step)]
    src = cast(src, t.dtype)
    if not kept:
        return t
    if step == 1:
        return _cat([_slice(t, dim, 0, kept.start), src, _slice(t, dim, kept.stop)], dim)
    # The rows between the written ones, by their distance from these: each class is a strided slice.
    rows = [_slice(t, dim, 0, kept[0])]
    last = kept[-1] + 1
    whole = len(kept) - 1
    between = [_slice(t, dim, kept[0] + r, last, step) for r in range(1, step)] if whole else []
    body = _stack([_slice(src, dim, 0, whole), *between], dim + 1) if whole else None
    if body is not None:
        shape = [*t.shape[:dim], whole * step, *t.shape[dim + 1 :]]
        rows.append(_view(body, shape))
    rows += [_slice(src, dim, whole), _slice(t, dim, last)]
    return _cat(rows, dim)


@_handles(aten.select_scatter.default)
def _select_scatter(t: SymbolicTensor, src: SymbolicTensor, dim: int, index: int) -> SymbolicTensor:
    dim = _dim(t, dim)
    index %= t.shape[dim]
    return _slice_scatter(t, _unsqueeze(src, dim), dim, index, index + 1)


@_handles(aten.constant_pad_nd.default)
def _pad(t: SymbolicTensor, pad: Sequence[int], value: float = 0) -> SymbolicTensor:
    for number in range(len(pad) // 2):
        dim = t.dim() - 1 - number
        for by, after in ((pad[2 * number], False), (pad[2 * number + 1], True)):
            if by < 0:
                t = _slice(t, dim, 0, t.shape[dim] + by) if after else _slice(t, dim, -by)
            elif by:
                shape = [*t.shape[:dim], by, *t.shape[dim + 1 :]]
                filled = lifted(torch.full((), value, dtype=t.dtype).expand(shape))
                t = _cat([t, filled] if after else [filled, t], dim)
    return t


@_handles(aten.fill.Scalar, aten.fill.Tensor)
def _fill(t: SymbolicTensor, value: Any) -> SymbolicTensor:
    if not isinstance(value, SymbolicTensor):
        # Not by way of a tensor of torch's default dtype, in which a float64 would lose half its digits.
        value = lifted(torch.empty((), dtype=t.dtype).fill_(value))
    return _expand(cast(value, t.dtype), t.shape)


def _filled(func: Any) -> Handler:
    """A factory that takes shape and dtype of a tensor, and none of its values."""

    def make(t: SymbolicTensor, *args: Any, **kwargs: Any) -> SymbolicTensor:
        like = torch.empty((), dtype=t.dtype).expand(t.shape)
        made: SymbolicTensor = lifted(func(like, *args, **kwargs))
        return made

    return make


for _factory in (
    *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default),
    *(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default),
):
    HANDLERS[_factory] = _filled(_factory)


@_handles(aten.index_select.default)
def _index_select(t: SymbolicTensor, dim: int, index: SymbolicTensor) -> SymbolicTensor:
    return _take(t, _dim(t, dim), index)


@_handles(aten.index.Tensor)
def _index(t: SymbolicTensor, indices: Sequence[SymbolicTensor | None]) -> SymbolicTensor:
    given = [dim for dim, index in enumerate(indices) if index is not None]
    index = indices[given[0]]
    assert index is not None, "an index was given"
    if len(given) > 1 or index.dim() != 1 or _value(index) is None:
        made: SymbolicTensor = compute(aten.index.Tensor, (t, list(indices)), {})
        return made
    return _take(t, given[0], index)


def _value(t: SymbolicTensor) -> torch.Tensor | None:
    """The values of a tensor that a conversion made itself; None for one that the checkpoint fills."""
    source = t.pieces[0].source[0] if len(t.pieces) == 1 else None
    if not isinstance(source, Computed) or t.pieces != geometry.whole(source, tuple(t.shape)):
        return None
    return source.value


def _take(t: SymbolicTensor, dim: int, index: SymbolicTensor) -> SymbolicTensor:
    """Rows in the order of a constant index, as runs of rows."""
    values = _value(index)
    if values is None:
        made: SymbolicTensor = compute(aten.index_select.default, (t, dim, index), {})
        return made
    rows = range(t.shape[dim])
    numbers = values.nonzero()[:, 0] if values.dtype in (torch.bool, torch.uint8) else values
    runs: list[tuple[int, int]] = []
    for row in (rows[int(number)] for number in numbers.tolist()):
        if runs and row == runs[-1][1]:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
    return _cat([_slice(t, dim, first, stop) for first, stop in runs] or [_slice(t, dim, 0, 0)], dim)
