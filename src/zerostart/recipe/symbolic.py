"""Symbolic tensors: a shape, a dtype, and the pieces that say where each element comes from.

A converter that runs on them runs its own code, the ordinary torch calls included; what the calls do to
indices is recorded, and no data exists. The recording happens below torch's Python API, at the operator
dispatcher, so that a method, a function, an einops pattern and a registered transformers operation all
arrive as the same few operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from zerostart import geometry
from zerostart.errors import ConversionError

__all__ = ["SymbolicTensor"]

aten = torch.ops.aten
Handler = Callable[..., Any]
H = TypeVar("H", bound=Handler)
_HANDLERS: dict[Any, Handler] = {}


class SymbolicTensor(torch.Tensor):
    """A tensor without data whose elements are known by their source addresses.

    ``pieces`` tile the tensor. The class is a ``torch.Tensor``, since converters ask with ``isinstance``.
    """

    pieces: tuple[geometry.Piece, ...]

    @staticmethod
    def __new__(
        cls, pieces: Sequence[geometry.Piece], shape: Sequence[int], dtype: torch.dtype
    ) -> SymbolicTensor:
        """Make a tensor of ``shape`` and ``dtype`` out of ``pieces``."""
        self: SymbolicTensor = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=torch.device("meta"), requires_grad=False
        )
        self.pieces = tuple(pieces)
        return self

    @classmethod
    def of(
        cls, name: str, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None
    ) -> SymbolicTensor:
        """The checkpoint tensor ``name`` as it is stored (``strides`` in elements, None for row-major)."""
        return cls(geometry.whole(name, shape, strides), shape, dtype)

    def __repr__(self) -> str:  # type: ignore[override]  # no contents to show
        return f"SymbolicTensor(shape={tuple(self.shape)}, dtype={self.dtype}, pieces={len(self.pieces)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has no classmethod here
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[Any, Any] | None = None,
    ) -> Any:
        """Record what ``func`` does to indices; refuse what does more than move elements."""
        handler = _HANDLERS.get(func)
        if handler is None:
            names = sorted({s for t in tree_leaves((args, kwargs)) for s in sources_of(t)})
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            raise ConversionError(
                f"the conversion of {shown} calls {func}, which does not only move elements; "
                "such a conversion cannot be traced to an index map"
            )
        return handler(*args, **(kwargs or {}))


def sources_of(value: Any) -> set[str]:
    """Names of the checkpoint tensors that ``value`` draws from (empty for anything not symbolic)."""
    if not isinstance(value, SymbolicTensor):
        return set()
    return {str(name) for piece in value.pieces for name in piece.source}


def _handles(*operators: Any) -> Callable[[H], H]:
    def register(handler: H) -> H:
        for operator in operators:
            _HANDLERS[operator] = handler
        return handler

    return register


def _dim(t: torch.Tensor, dim: int, extra: int = 0) -> int:
    rank = t.dim() + extra
    if not -rank <= dim < max(rank, 1):
        raise IndexError(f"dimension {dim} is out of range for {t.dim()} dimensions")
    return dim % rank if rank else 0


def _same(t: SymbolicTensor, pieces: Sequence[geometry.Piece], shape: Sequence[int]) -> SymbolicTensor:
    return SymbolicTensor(pieces, shape, t.dtype)


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
def _cast(t: SymbolicTensor, dtype: torch.dtype | None = None, **_: Any) -> SymbolicTensor:
    return SymbolicTensor(t.pieces, t.shape, dtype or t.dtype)


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
    pieces = geometry.concatenate([(t.pieces, t.shape[dim]) for t in parts], dim)
    return SymbolicTensor(pieces, shape, dtype)


@_handles(aten.stack.default)
def _stack(tensors: Sequence[SymbolicTensor], dim: int = 0) -> SymbolicTensor:
    if any(t.shape != tensors[0].shape for t in tensors):
        raise RuntimeError(f"stack expects equal sizes: {[tuple(t.shape) for t in tensors[:4]]}")
    at = _dim(tensors[0], dim, extra=1)
    # Not by way of unsqueezed tensors: a stack of experts has hundreds, and each would be a tensor more.
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
    pieces = geometry.concatenate([(geometry.insert_axis(t.pieces, at), 1) for t in tensors], at)
    shape = [*tensors[0].shape[:at], len(tensors), *tensors[0].shape[at:]]
    return SymbolicTensor(pieces, shape, dtype)


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
