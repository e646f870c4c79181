"""Views of values, and writes through them.

Each view is one step from a value to the next: an operator whose pieces can be followed forwards and, for a
write, backwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch._ops import OpOverload

from zerostart.recipe.operators import (
    permute,
    reshape,
    select_scatter,
    slice_scatter,
)
from zerostart.recipe.values import HANDLERS, Value, compute_one
from zerostart.upstream.types import Arguments

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class StridedLayout:
    """Positions of a tensor's elements in its storage, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def overlaps(self) -> bool:
        """Return True if several elements may have one address."""
        span = 1
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size > 1 and stride < span:
                return True
            span += (size - 1) * stride
        return False


@dataclass(frozen=True, slots=True)
class ViewOperation:
    """One view of a value."""

    func: OpOverload
    #: Further arguments of ``func``.
    args: Arguments
    #: Layout of the result.
    layout: StridedLayout

    @property
    def reads_anew(self) -> bool:
        """True if elements are computed from the base's."""
        return self.func in _COMPUTED

    @property
    def repeats(self) -> bool:
        """True if an element may be shown more than once."""
        return self.func is aten.expand.default and self.layout.overlaps()

    def of(self, base: Value) -> Value:
        """Return the view of ``base``."""
        return HANDLERS[self.func](base, *self.args)

    def written(self, base: Value, new: Value) -> Value:
        """Return ``base`` after ``new`` was written into its view."""
        return KNOWN_VIEWS[self.func](base, new, *self.args)


#: Views that change nothing.
SAME = {aten.alias.default, aten.detach.default}


def _undo_reshape(base: Value, new: Value, *_: object) -> Value:
    return reshape(new, base.shape)


def _undo_permute(base: Value, new: Value, dims: Sequence[int]) -> Value:
    order = [d % base.dim() for d in dims]
    return permute(new, [order.index(d) for d in range(base.dim())])


def _undo_transpose(base: Value, new: Value, *args: object) -> Value:
    return HANDLERS[aten.transpose.int](new, *(args or (0, 1))) if base.dim() > 1 or args else new


def _conjugate(t: Value) -> Value:
    return compute_one(aten._conj_physical.default, t) if t.dtype.is_complex else t


def _view_dtype(t: Value, dtype: torch.dtype) -> Value:
    return t if t.dtype == dtype else compute_one(aten.view.dtype, t, dtype)


#: Views with computed elements.
_COMPUTED: dict[object, Callable[..., Value]] = {
    aten._conj.default: _conjugate,
    aten._neg_view.default: functools.partial(compute_one, aten.neg.default),
    aten.view_as_real.default: functools.partial(compute_one, aten.view_as_real.default),
    aten.view_as_complex.default: functools.partial(compute_one, aten.view_as_complex.default),
    aten.view.dtype: _view_dtype,
}
HANDLERS.update(_COMPUTED)
#: The base of each view after a write: ``(base, new view, further arguments) -> base``.
KNOWN_VIEWS: dict[object, Callable[..., Value]] = {
    aten.view.default: _undo_reshape,
    aten._unsafe_view.default: _undo_reshape,
    aten.unsqueeze.default: _undo_reshape,
    aten.squeeze.default: _undo_reshape,
    aten.squeeze.dim: _undo_reshape,
    aten.squeeze.dims: _undo_reshape,
    aten.permute.default: _undo_permute,
    aten.transpose.int: _undo_transpose,
    aten.t.default: _undo_transpose,
    aten.slice.Tensor: slice_scatter,
    aten.select.int: select_scatter,
    aten.expand.default: _undo_reshape,
    aten._conj.default: lambda base, new: _conjugate(new),
    aten._neg_view.default: lambda base, new: compute_one(aten.neg.default, new),
    aten.view_as_real.default: lambda base, new: compute_one(aten.view_as_complex.default, new),
    aten.view_as_complex.default: lambda base, new: compute_one(aten.view_as_real.default, new),
    aten.view.dtype: lambda base, new, dtype: _view_dtype(new, base.dtype),
}


def single_views(func: OpOverload, shape: Sequence[int], args: Arguments) -> list[tuple[Any, Arguments]]:
    """Split a view with several results into single views."""
    if func is aten.unbind.int:
        dim = args[0] if args else 0
        return [(aten.select.int, (dim, index)) for index in range(shape[dim])]
    if func in _SPLITS:
        sizes, dim = args[0], args[1] if len(args) > 1 else 0
        if isinstance(sizes, int):
            length = shape[dim]
            sizes = [min(sizes, length - at) for at in range(0, length, sizes)] if length else [0]
        ends = accumulate(sizes, initial=0)
        return [(aten.slice.Tensor, (dim, start, stop)) for start, stop in pairwise(ends)]
    return [(func, args)]


_SPLITS = {
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
}
