"""Operators that move elements, as functions of values; importing this module registers them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeVar

import torch

from zerostart import geometry
from zerostart.recipe.values import HANDLERS, Computed, Value, compute_one, make_constant

aten = torch.ops.aten
H = TypeVar("H", bound=Callable[..., Any])


def _handles(*operators: object) -> Callable[[H], H]:
    def register(handler: H) -> H:
        for operator in operators:
            HANDLERS[operator] = handler
        return handler

    return register


def _dim(t: Value, dim: int, extra: int = 0) -> int:
    rank = t.dim() + extra
    if not -rank <= dim < max(rank, 1):
        raise IndexError(f"dimension {dim} is out of range for {t.dim()} dimensions")
    return dim % rank if rank else 0


def _replace_pieces(t: Value, pieces: Sequence[geometry.Piece], shape: Sequence[int]) -> Value:
    return Value(tuple(pieces), tuple(shape), t.dtype, t.stored)


@_handles(aten.clone.default)
def _clone(t: Value, **_: object) -> Value:
    return t


@_handles(aten._to_copy.default)
def cast(t: Value, dtype: torch.dtype | None = None, **_: object) -> Value:
    """Note the cast of ``t``, after computing an earlier one that lost digits."""
    if dtype is None or dtype == t.dtype:
        return t
    # The earlier cast has lost digits, so it is computed; only the new one is noted.
    if t.rounds(dtype):
        t = compute_one(aten._to_copy.default, t, dtype=t.dtype)
    return Value(t.pieces, t.shape, dtype, t.stored)


@_handles(aten.copy.default)
def _copy(to: Value, t: Value, non_blocking: bool = False) -> Value:
    return expand(cast(t, to.dtype), to.shape)


@_handles(aten.view.default, aten._unsafe_view.default)
def reshape(t: Value, size: Sequence[int]) -> Value:
    """Reshape in row-major order. Raises RuntimeError, as torch does."""
    target = list(size)
    if -1 in target:
        # One size may be -1, as in torch.
        product = prod(s for s in target if s != -1)
        target[target.index(-1)] = t.numel() // product if product else 0
    if prod(target) != t.numel():
        raise RuntimeError(f"shape {list(size)} is invalid for input of size {t.numel()}")
    return _replace_pieces(t, geometry.reshape(t.pieces, t.shape, target), target)


@_handles(aten.permute.default)
def permute(t: Value, dims: Sequence[int]) -> Value:
    """Permute dimensions. Raises IndexError for a missing one."""
    order = [_dim(t, d) for d in dims]
    return _replace_pieces(t, geometry.permute(t.pieces, order), [t.shape[d] for d in order])


@_handles(aten.transpose.int)
def _transpose(t: Value, dim0: int, dim1: int) -> Value:
    order = list(range(t.dim()))
    a, b = _dim(t, dim0), _dim(t, dim1)
    if order:
        order[a], order[b] = order[b], order[a]
    return permute(t, order)


@_handles(aten.t.default)
def _t(t: Value) -> Value:
    return t if t.dim() < 2 else _transpose(t, 0, 1)


@_handles(aten.slice.Tensor)
def take_slice(
    t: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Value:
    """Slice ``start:end:step`` along ``dim``. Raises IndexError for a missing dimension."""
    dim = _dim(t, dim)
    rows = range(t.shape[dim])[slice(start, end, step)]
    shape = list(t.shape)
    shape[dim] = len(rows)
    return _replace_pieces(t, geometry.crop(t.pieces, dim, rows.start, rows.stop, step), shape)


@_handles(aten.select.int)
def _select(t: Value, dim: int, index: int) -> Value:
    dim = _dim(t, dim)
    if not -t.shape[dim] <= index < t.shape[dim]:
        raise IndexError(f"index {index} is out of range for dimension {dim} of size {t.shape[dim]}")
    index %= t.shape[dim]
    return _squeeze_dims(take_slice(t, dim, index, index + 1), [dim])


@_handles(aten.unsqueeze.default)
def _unsqueeze(t: Value, dim: int) -> Value:
    at = _dim(t, dim, extra=1)
    shape = [*t.shape[:at], 1, *t.shape[at:]]
    return _replace_pieces(t, geometry.insert_axis(t.pieces, at), shape)


@_handles(aten.squeeze.dims)
def _squeeze_dims(t: Value, dims: Sequence[int]) -> Value:
    squeezed = {_dim(t, d) for d in dims}
    shape = [size for d, size in enumerate(t.shape) if not (d in squeezed and size == 1)]
    return _replace_pieces(t, geometry.reshape(t.pieces, t.shape, shape), shape)


@_handles(aten.squeeze.default)
def _squeeze(t: Value) -> Value:
    return _squeeze_dims(t, range(t.dim()))


@_handles(aten.squeeze.dim)
def _squeeze_dim(t: Value, dim: int) -> Value:
    return _squeeze_dims(t, [dim] if t.dim() else [])


@_handles(aten.expand.default)
def expand(t: Value, size: Sequence[int], *, implicit: bool = False) -> Value:
    """Broadcast to ``size``."""
    lead = len(size) - t.dim()
    # Add missing dimensions in front, then repeat those of size 1.
    shape = [1] * lead + list(t.shape)
    target = [old if new == -1 else new for old, new in zip(shape, size, strict=True)]
    pieces = geometry.reshape(t.pieces, t.shape, shape)
    return _replace_pieces(t, geometry.broadcast(pieces, shape, target), target)


@_handles(aten.repeat.default)
def _repeat(t: Value, repeats: Sequence[int]) -> Value:
    lead = len(repeats) - t.dim()
    result = reshape(t, [1] * lead + list(t.shape)) if lead else t
    for dim, times in enumerate(repeats):
        if times == 0:
            result = take_slice(result, dim, 0, 0)
        elif times != 1:
            result = cat([result] * times, dim)
    return result


@_handles(aten.cat.default)
def cat(tensors: Sequence[Value], dim: int = 0) -> Value:
    """Concatenate along ``dim``. Raises RuntimeError or IndexError, as torch does."""
    # For compatibility, torch skips one-dimensional empty tensors here.
    parts = [t for t in tensors if not (t.dim() == 1 and t.shape[0] == 0)] or list(tensors)
    dim = _dim(parts[0], dim)
    # The result has the promoted dtype, as in torch.
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
    return Value(pieces, tuple(shape), dtype, _union_stored(parts))


@_handles(aten.stack.default)
def stack(tensors: Sequence[Value], dim: int = 0) -> Value:
    """Stack along a new dimension ``dim``. Raises RuntimeError or IndexError."""
    size = tensors[0].shape
    if any(t.shape != size for t in tensors):
        raise RuntimeError(f"stack expects equal sizes: {[tuple(t.shape) for t in tensors[:4]]}")
    at = _dim(tensors[0], dim, extra=1)
    # Unsqueezing first would make hundreds of tensors for a stack of experts.
    dtype = functools.reduce(torch.promote_types, {t.dtype for t in tensors})
    tensors = [t if t.dtype == dtype else cast(t, dtype) for t in tensors]
    pieces = geometry.stack([t.pieces for t in tensors], at)
    return Value(pieces, (*size[:at], len(tensors), *size[at:]), dtype, _union_stored(tensors))


def _union_stored(tensors: Sequence[Value]) -> frozenset[torch.dtype]:
    return frozenset().union(*{t.stored for t in tensors})


@_handles(aten.flip.default)
def _flip(t: Value, dims: Sequence[int]) -> Value:
    for dim in dims if t.numel() > 1 else ():
        # One piece for each row: pieces have no negative strides.
        rows = [take_slice(t, dim, i, i + 1) for i in reversed(range(t.shape[_dim(t, dim)]))]
        t = cat(rows, dim)
    return t


@_handles(aten.roll.default)
def _roll(t: Value, shifts: Sequence[int], dims: Sequence[int] = ()) -> Value:
    if not dims:
        return reshape(_roll(reshape(t, [-1]), shifts, [0]), t.shape)
    for by, dim in zip(shifts, dims, strict=True) if t.numel() else ():
        # Cut, and put the second part first.
        at = -by % t.shape[_dim(t, dim)]
        t = cat([take_slice(t, dim, at), take_slice(t, dim, 0, at)], dim)
    return t


@_handles(aten.slice_scatter.default)
def slice_scatter(
    t: Value,
    src: Value,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Value:
    """Replace the slice ``start:end:step`` along ``dim`` by ``src``. Raises IndexError."""
    dim = _dim(t, dim)
    size = t.shape[dim]
    replaced = range(size)[slice(start, end, step)]
    src = cast(src, t.dtype)
    if not replaced:
        return t
    if step == 1:
        return cat([take_slice(t, dim, 0, replaced.start), src, take_slice(t, dim, replaced.stop)], dim)
    # Rows at equal distance after the written ones form one strided slice each.
    rows = [take_slice(t, dim, 0, replaced[0])]
    last = replaced[-1] + 1
    whole = len(replaced) - 1
    between = [take_slice(t, dim, replaced[0] + r, last, step) for r in range(1, step)] if whole else []
    body = stack([take_slice(src, dim, 0, whole), *between], dim + 1) if whole else None
    if body is not None:
        shape = [*t.shape[:dim], whole * step, *t.shape[dim + 1 :]]
        rows.append(reshape(body, shape))
    # The last written row, and the rest of the tensor.
    rows += [take_slice(src, dim, whole), take_slice(t, dim, last)]
    return cat(rows, dim)


@_handles(aten.select_scatter.default)
def select_scatter(t: Value, src: Value, dim: int, index: int) -> Value:
    """Replace row ``index`` along ``dim`` by ``src``. Raises IndexError."""
    dim = _dim(t, dim)
    index %= t.shape[dim]
    return slice_scatter(t, _unsqueeze(src, dim), dim, index, index + 1)


@_handles(aten.constant_pad_nd.default)
def _pad(t: Value, pad: Sequence[int], value: float = 0) -> Value:
    # Pairs (before, after) from the last dimension to the first; negative ones crop.
    for number in range(len(pad) // 2):
        dim = t.dim() - 1 - number
        for by, after in ((pad[2 * number], False), (pad[2 * number + 1], True)):
            if by < 0:
                t = take_slice(t, dim, 0, t.shape[dim] + by) if after else take_slice(t, dim, -by)
            elif by:
                shape = [*t.shape[:dim], by, *t.shape[dim + 1 :]]
                filled = make_constant(torch.full((), value, dtype=t.dtype, device="cpu").expand(shape))
                t = cat([t, filled] if after else [filled, t], dim)
    return t


@_handles(aten.zero.default)
def _zero(t: Value) -> Value:
    return _fill(t, False)


@_handles(aten.fill.Scalar, aten.fill.Tensor)
def _fill(t: Value, value: Any) -> Value:
    if not isinstance(value, Value):
        # Fill in the final dtype: torch's default dtype would lose digits of a float64.
        value = make_constant(torch.empty((), dtype=t.dtype, device="cpu").fill_(value))
    return expand(cast(value, t.dtype), t.shape)


@_handles(aten.index.Tensor)
def _index(t: Value, indices: Sequence[Value | None]) -> Value:
    indexed = [dim for dim, index in enumerate(indices) if index is not None]
    index = indices[indexed[0]]
    assert index is not None, "an index was given"
    # Several indices, indices of several dimensions and indices from weights are computed.
    if len(indexed) > 1 or index.dim() != 1 or _get_elements(index) is None:
        return compute_one(aten.index.Tensor, t, list(indices))
    return _select_rows(t, indexed[0], index)


def _get_elements(t: Value) -> torch.Tensor | None:
    """Return the elements of a constant; otherwise None."""
    source = t.pieces[0].source[0] if len(t.pieces) == 1 else None
    if not isinstance(source, Computed) or t.pieces != geometry.whole(source, tuple(t.shape)):
        return None
    return source.value


@_handles(aten.index_select.default)
def _select_rows(t: Value, dim: int, index: Value) -> Value:
    dim, values = _dim(t, dim), _get_elements(index)
    if values is None:
        return compute_one(aten.index_select.default, t, dim, index)
    rows = range(t.shape[dim])
    # A mask selects the row numbers where it is true.
    numbers = values.nonzero()[:, 0] if values.dtype in (torch.bool, torch.uint8) else values
    runs: list[tuple[int, int]] = []
    for row in (rows[int(number)] for number in numbers.tolist()):
        if runs and row == runs[-1][1]:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
    return cat([take_slice(t, dim, first, stop) for first, stop in runs] or [take_slice(t, dim, 0, 0)], dim)
