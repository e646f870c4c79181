"""Views: what an operator takes out of a value, and what a value becomes when its view is written into.

Each view is one step from a value to the next. Where a step is an operator that moves elements, the pieces
follow it both ways. Any other view of the same storage is known by its size and strides, and is taken out of
the elements in the order in which they lie in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch._ops import OpOverload

from zerostart.geometry import row_major_strides
from zerostart.recipe.operators import (
    cast,
    cat,
    expand,
    permute,
    reshape,
    select_scatter,
    slice_of,
    slice_scatter,
    stack,
)
from zerostart.recipe.refusals import refusal
from zerostart.recipe.values import HANDLERS, Value, compute, constant, names_of
from zerostart.upstream.torch.types import Arguments

aten = torch.ops.aten
#: A strided view that is made of more rows than this, or written into more runs, is computed.
MOST_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the elements of a tensor lie in its storage."""

    shape: tuple[int, ...]
    #: In elements.
    strides: tuple[int, ...]
    #: In elements.
    offset: int

    def overlaps(self) -> bool:
        """Whether several elements have one address."""
        span = 1
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size > 1 and stride < span:
                addresses = _addresses(self, 0)
                return int(addresses.reshape(-1).sort().values.diff().eq(0).sum()) > 0
            span += (size - 1) * stride
        return False


@dataclass(frozen=True, slots=True)
class Step:
    """One view of a value."""

    func: OpOverload | _Strided
    #: Its further arguments.
    args: Arguments
    #: Of the result.
    layout: Layout
    #: Of the result.
    dtype: torch.dtype

    @property
    def reads_anew(self) -> bool:
        """Whether the elements of the view are others than those of what it is taken of."""
        return self.func in _ANEW

    @property
    def repeats(self) -> bool:
        """Whether the view may show an element more than once, so that a write has to go by addresses."""
        return self.func in (aten.expand.default, _STRIDED) and self.layout.overlaps()

    def of(self, base: Value) -> Value:
        """What the view shows of ``base``."""
        made: Value = HANDLERS[self.func](base, *self.args)
        return made

    def written(self, base: Value, new: Value) -> Value:
        """``base``, where its view has become ``new``."""
        made: Value = KNOWN_VIEWS[self.func](base, new, *self.args)
        return made


#: Views that leave everything as it is.
SAME = {aten.alias.default, aten.detach.default}


def _reshaped(base: Value, new: Value, *_: object) -> Value:
    return reshape(new, base.shape)


def _permuted(base: Value, new: Value, dims: Sequence[int]) -> Value:
    order = [d % base.dim() for d in dims]
    return permute(new, [order.index(d) for d in range(base.dim())])


def _turned(base: Value, new: Value, *args: object) -> Value:
    made: Value = HANDLERS[aten.transpose.int](new, *(args or (0, 1))) if base.dim() > 1 or args else new
    return made


def _conjugate(t: Value, *_: object) -> Value:
    made: Value = compute(aten._conj_physical.default, (t,), {}) if t.dtype.is_complex else t
    return made


def _negative(t: Value, *_: object) -> Value:
    made: Value = compute(aten.neg.default, (t,), {})
    return made


def _as_real(t: Value, *_: object) -> Value:
    made: Value = compute(aten.view_as_real.default, (t,), {})
    return made


def _as_complex(t: Value, *_: object) -> Value:
    made: Value = compute(aten.view_as_complex.default, (t,), {})
    return made


def _as_dtype(t: Value, dtype: torch.dtype) -> Value:
    made: Value = t if t.dtype == dtype else compute(aten.view.dtype, (t, dtype), {})
    return made


#: By operator: the value that a view was taken of, after a write into the view.
KNOWN_VIEWS: dict[object, Callable[..., Value]] = {
    aten.view.default: _reshaped,
    aten._unsafe_view.default: _reshaped,
    aten.unsqueeze.default: _reshaped,
    aten.squeeze.default: _reshaped,
    aten.squeeze.dim: _reshaped,
    aten.squeeze.dims: _reshaped,
    aten.permute.default: _permuted,
    aten.transpose.int: _turned,
    aten.t.default: _turned,
    aten.slice.Tensor: slice_scatter,
    aten.select.int: select_scatter,
    aten.expand.default: _reshaped,
    aten._conj.default: lambda base, new: _conjugate(new),
    aten._neg_view.default: lambda base, new: _negative(new),
    aten.view_as_real.default: lambda base, new: _as_complex(new),
    aten.view_as_complex.default: lambda base, new: _as_real(new),
    aten.view.dtype: lambda base, new, dtype: _as_dtype(new, base.dtype),
}
_ANEW = {
    *(aten._conj.default, aten._neg_view.default),
    *(aten.view_as_real.default, aten.view_as_complex.default, aten.view.dtype),
}
HANDLERS[aten._conj.default] = _conjugate
HANDLERS[aten._neg_view.default] = _negative
HANDLERS[aten.view_as_real.default] = _as_real
HANDLERS[aten.view_as_complex.default] = _as_complex
HANDLERS[aten.view.dtype] = _as_dtype


def single_views(func: OpOverload, shape: Sequence[int], args: Arguments) -> list[tuple[Any, Arguments]]:
    """A view with several results as views with one each."""
    if func in (aten.unbind.int,):
        dim = args[0] if args else 0
        return [(aten.select.int, (dim, index)) for index in range(shape[dim])]
    if func in _SPLITS:
        sizes, dim = args[0], args[1] if len(args) > 1 else 0
        if isinstance(sizes, int):
            length = shape[dim]
            sizes = [min(sizes, length - at) for at in range(0, length, sizes)] if length else [0]
        return [(aten.slice.Tensor, (dim, at, at + size)) for at, size in _running(sizes)]
    return [(func, args)]


_SPLITS = {
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
}


def _running(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    at = 0
    for size in sizes:
        yield at, size
        at += size


class _Strided:
    """The operator of a view that is known by its layout; a place of its own in the tables."""

    def __str__(self) -> str:
        return "as_strided"


_STRIDED = _Strided()


def strided_step(source: Layout, view: Layout, dtype: torch.dtype) -> Step:
    """The view ``view`` of the storage that a value laid out as ``source`` fills."""
    return Step(_STRIDED, (source, view), view, dtype)


def _in_memory(t: Value, layout: Layout) -> tuple[Value, list[int]]:
    """The elements in the order of their addresses, and the order of the dimensions that leads there."""
    # A value has elements and no addresses: by its layout it is laid out as one run of memory first.
    order = sorted(range(t.dim()), key=lambda d: (-layout.strides[d], -layout.shape[d]))
    ordered = [layout.shape[d] for d in order]
    dense = row_major_strides(ordered)
    if any(n > 1 and layout.strides[d] != s for d, n, s in zip(order, ordered, dense, strict=True)):
        raise refusal(
            f"the conversion of {names_of(t)} calls as_strided on a tensor that does not fill its "
            "memory; make it contiguous before"
        )
    return reshape(permute(t, order), [t.numel()]), order


def _take_strided(t: Value, source: Layout, view: Layout) -> Value:
    flat, _ = _in_memory(t, source)
    first = view.offset - source.offset
    _check_bounds(t, view, first, flat.numel())
    if not prod(view.shape):
        return reshape(slice_of(flat, 0, 0, 0), view.shape)
    order = sorted(range(len(view.shape)), key=lambda d: -view.strides[d])
    loops = [(view.shape[d], view.strides[d]) for d in order]
    table = reshape(flat, [flat.numel(), 1])
    # As slices, which stay reads from the checkpoint; beyond so many rows as a gather, which is computed.
    made = _rows(table, first, loops) if _row_count(loops) <= MOST_ROWS else None
    if made is None:
        index = constant(_addresses(view, first).reshape(-1))
        made = compute(aten.index_select.default, (flat, 0, index), {})
        return reshape(made, view.shape)
    back = [order.index(d) for d in range(len(order))]
    return permute(reshape(made, [view.shape[d] for d in order]), back)


def _check_bounds(t: Value, view: Layout, first: int, numel: int) -> None:
    last = first + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True))
    if prod(view.shape) and not 0 <= first <= last < numel:
        raise refusal(
            f"the conversion of {names_of(t)} calls as_strided with a view that reaches outside of the tensor"
        )


def _row_count(loops: Sequence[tuple[int, int]]) -> int:
    """How many pieces a strided view may be made of: its rows, where rows overlap or are not in line."""
    rows = 1
    for at, (size, stride) in enumerate(loops):
        span = 1 + sum((n - 1) * s for n, s in loops[at + 1 :])
        if stride and span > stride:
            rows *= size
    return rows


def _rows(table: Value, first: int, loops: Sequence[tuple[int, int]]) -> Value:
    """Rows ``first`` and on of ``table``, by nested loops of sizes and strides, largest stride first.

    The columns of the table are the last dimension of the result.
    """
    columns = table.shape[1]
    if not loops:
        return reshape(slice_of(table, 0, first, first + 1), [columns])
    (size, stride), inner = loops[0], loops[1:]
    shape = [n for n, _ in inner]
    if size == 1 or stride == 0:
        return expand(reshape(_rows(table, first, inner), [1, *shape, columns]), [size, *shape, columns])
    last = first + (size - 1) * stride
    if not inner:
        return slice_of(table, 0, first, last + 1, stride)
    # Rows that overlap, or reach into the next block, cannot be columns of one reshape: one by one.
    if 1 + sum((n - 1) * s for n, s in inner) > stride:
        return stack([_rows(table, first + i * stride, inner) for i in range(size)])
    # All but the last lie in blocks of one stride, which become columns; the last may end early.
    blocks = reshape(slice_of(table, 0, first, last), [size - 1, stride, columns])
    side = reshape(permute(blocks, (1, 0, 2)), [stride, (size - 1) * columns])
    made = reshape(_rows(side, 0, inner), [*shape, size - 1, columns])
    rows = permute(made, [len(shape), *range(len(shape)), len(shape) + 1])
    return cat([rows, reshape(_rows(table, last, inner), [1, *shape, columns])])


def _addresses(view: Layout, first: int) -> torch.Tensor:
    """The address of each element of a strided view, 64-bit, in the view's shape."""
    found = torch.full((), first, dtype=torch.int64, device="cpu")
    for d, (size, stride) in enumerate(zip(view.shape, view.strides, strict=True)):
        along = torch.arange(size, dtype=torch.int64, device="cpu") * stride
        found = found.unsqueeze(-1) + along if d else found + along
    return found.reshape(view.shape)


def _write_strided(base: Value, new: Value, source: Layout, view: Layout) -> Value:
    flat, order = _in_memory(base, source)
    first = view.offset - source.offset
    _check_bounds(base, view, first, flat.numel())
    if not new.numel():
        return base
    new = cast(reshape(new, [new.numel()]), flat.dtype)
    # Where a view shows a place twice, the last of the elements that go there stays, as in torch's copy.
    addresses, at = _last_written(_addresses(view, first).reshape(-1))
    breaks = ((addresses[1:] - addresses[:-1] != 1) | (at[1:] - at[:-1] != 1)).nonzero()[:, 0] + 1
    if len(breaks) < MOST_ROWS:
        made = _runs_written(flat, new, addresses, at, breaks.tolist())
    else:
        kept = compute(aten.index_select.default, (new, 0, constant(at)), {})
        made = compute(aten.index_put.default, (flat, [constant(addresses)], kept), {})
    ordered = reshape(made, [source.shape[d] for d in order])
    return permute(ordered, [order.index(d) for d in range(len(order))])


def _last_written(addresses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each address once, in order, and which of the elements that go there is the last."""
    ordered, at = addresses.sort(stable=True)
    last = torch.ones(len(ordered), dtype=torch.bool, device="cpu")
    last[:-1] = ordered[1:] != ordered[:-1]
    return ordered[last], at[last]


def _runs_written(
    flat: Value, new: Value, addresses: torch.Tensor, at: torch.Tensor, breaks: Sequence[int]
) -> Value:
    """``flat`` with elements ``at`` of ``new`` put to ``addresses``, in runs that end at ``breaks``."""
    parts, done = [], 0
    for start, stop in pairwise([0, *breaks, len(addresses)]):
        to, first, length = int(addresses[start]), int(at[start]), stop - start
        parts += [slice_of(flat, 0, done, to), slice_of(new, 0, first, first + length)]
        done = to + length
    return cat([*parts, slice_of(flat, 0, done)])


HANDLERS[_STRIDED] = _take_strided
KNOWN_VIEWS[_STRIDED] = _write_strided


def straight(steps: tuple[Step, ...], source: Layout) -> tuple[Step, ...]:
    """The view by ``steps`` of a memory laid out as ``source``, by one strided step at the end.

    Steps behind which the elements are others stay.
    """
    # Steps that only move elements melt into one strided step; behind one that computes (a conjugate, other
    # bits of a dtype) there is no common address space any more.
    after = max((n + 1 for n, step in enumerate(steps) if step.reads_anew), default=0)
    kept, last = steps[:after], steps[-1]
    if after == len(steps):
        return kept
    base = kept[-1].layout if kept else source
    return (*kept, strided_step(base, last.layout, last.dtype))
