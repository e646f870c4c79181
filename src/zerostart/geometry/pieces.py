"""Strided pieces: boxes of a tensor with the source address of each element.

A tensor that a conversion produced is a tuple of pieces that tile it. The functions here are the index side
of tensor operations that only move elements; each takes pieces and returns pieces.

Planning costs grow with the number of pieces, and two things keep it small. An axis has digits and not one
stride (``digits``), so that a permutation of rows or a transposed reshape remains one piece. A piece may read
from a run of tensors, so that a stack of experts is one piece.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product
from math import prod

from zerostart.geometry.digits import Digits, cut, extent, row_major_strides, simplify, split_at

#: A reshape that no digit boundary allows is cut into at most this many pieces before it is refused.
MAX_PIECES = 1 << 16


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, and the source addresses that fill it.

    Addresses and strides are in elements: address ``a`` is element ``a % unit`` of tensor ``a // unit``. A
    stride of ``unit`` or more steps from tensor to tensor, and is never merged with a smaller one.
    """

    #: First index of the box in each dimension.
    origin: tuple[int, ...]
    #: Digits of each dimension of the box.
    axes: tuple[Digits, ...]
    #: A run of equally sized tensors, one after the other in one address space.
    source: tuple[Hashable, ...]
    #: Addresses of each of them, from its first element to its last.
    unit: int
    #: Address of the first element of the box.
    offset: int

    @property
    def extent(self) -> tuple[int, ...]:
        """Shape of the box."""
        return tuple(extent(axis) for axis in self.axes)

    @property
    def numel(self) -> int:
        """Number of elements of the box."""
        return prod(self.extent)


def whole(source: Hashable, shape: Sequence[int], strides: Sequence[int] | None = None) -> tuple[Piece, ...]:
    """A source tensor of ``shape`` as it is stored: row-major, or with ``strides`` (elements)."""
    stored = _stored(tuple(shape), None if strides is None else tuple(strides))
    return () if stored is None else (Piece(stored.origin, stored.axes, (source,), stored.unit, 0),)


@lru_cache(maxsize=4096)
def _stored(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> Piece | None:
    if prod(shape) == 0:
        return None
    steps = row_major_strides(shape) if strides is None else strides
    axes = tuple(simplify(((size, stride),)) for size, stride in zip(shape, steps, strict=True))
    unit = 1 + sum((size - 1) * stride for size, stride in zip(shape, steps, strict=True))
    return Piece((0,) * len(shape), axes, (), unit, 0)


def crop(pieces: Sequence[Piece], dim: int, start: int, stop: int, step: int = 1) -> tuple[Piece, ...]:
    """The slice ``start:stop:step`` along ``dim`` (``step`` at least 1), re-based to its first element."""
    out: list[Piece] = []
    for p in pieces:
        low, size = p.origin[dim], extent(p.axes[dim])
        # The first index kept that lies inside this piece, which with a step need not be the piece's first.
        skip = max(0, -(-(low - start) // step))
        first = start + skip * step
        if first >= min(stop, low + size):
            continue
        # `cut` counts from the first index of the piece; `skip` elements of the slice come before this piece.
        for position, offset, digits in cut(p.axes[dim], first - low, min(stop, low + size) - low, step):
            out.append(
                replace(
                    p,
                    origin=(*p.origin[:dim], skip + position, *p.origin[dim + 1 :]),
                    axes=(*p.axes[:dim], digits, *p.axes[dim + 1 :]),
                    offset=p.offset + offset,
                )
            )
    return tuple(out)


def permute(pieces: Sequence[Piece], order: Sequence[int]) -> tuple[Piece, ...]:
    """Reorder the dimensions: dimension ``i`` of the result is dimension ``order[i]``."""
    return tuple(
        replace(p, origin=tuple(p.origin[d] for d in order), axes=tuple(p.axes[d] for d in order))
        for p in pieces
    )


def broadcast(pieces: Sequence[Piece], shape: Sequence[int], target: Sequence[int]) -> tuple[Piece, ...]:
    """Expand dimensions of size 1 of ``shape`` to ``target``, by stride 0."""
    grown = [d for d, (old, new) in enumerate(zip(shape, target, strict=True)) if old != new]
    out = []
    for p in pieces:
        axes = list(p.axes)
        # A grown dimension has size 1, so that every piece covers all of it, from index 0.
        for d in grown:
            axes[d] = simplify(((target[d], 0),))
        out.append(replace(p, axes=tuple(axes)))
    return tuple(out)


def insert_axis(pieces: Sequence[Piece], dim: int) -> tuple[Piece, ...]:
    """Add a dimension of size 1 before ``dim``."""
    return tuple(
        Piece(
            (*p.origin[:dim], 0, *p.origin[dim:]),
            (*p.axes[:dim], (), *p.axes[dim:]),
            p.source,
            p.unit,
            p.offset,
        )
        for p in pieces
    )


def shift(pieces: Sequence[Piece], dim: int, by: int) -> tuple[Piece, ...]:
    """Move every piece along ``dim``."""
    if by == 0:
        return tuple(pieces)
    return tuple(
        Piece((*p.origin[:dim], p.origin[dim] + by, *p.origin[dim + 1 :]), p.axes, p.source, p.unit, p.offset)
        for p in pieces
    )


def concatenate(parts: Sequence[tuple[Sequence[Piece], int]], dim: int) -> tuple[Piece, ...]:
    """Join ``(pieces, size along dim)`` parts along ``dim``.

    A part without elements still takes its size.
    """
    out: list[Piece] = []
    at = 0
    for pieces, size in parts:
        out += shift(pieces, dim, at)
        at += size
    return join_runs(out, dim)


def stack(parts: Sequence[Sequence[Piece]], dim: int) -> tuple[Piece, ...]:
    """Join parts of one shape along a new dimension ``dim``."""
    firsts = [pieces[0] for pieces in parts if len(pieces) == 1]
    if 1 < len(firsts) == len(parts) and all(_alike(firsts[0], p, firsts[0].origin) for p in firsts):
        # As concatenating would, without two more pieces for each of hundreds of experts.
        (p, *_) = insert_axis(firsts[:1], dim)
        axes = (*p.axes[:dim], ((len(firsts), p.unit),), *p.axes[dim + 1 :])
        return (replace(p, axes=axes, source=tuple(part.source[0] for part in firsts)),)
    return concatenate([(insert_axis(pieces, dim), 1) for pieces in parts], dim)


def _alike(p: Piece, q: Piece, origin: tuple[int, ...]) -> bool:
    same = (p.unit, p.offset, p.axes, origin) == (q.unit, q.offset, q.axes, q.origin)
    return same and len(p.source) == len(q.source) == 1


def join_runs(pieces: Sequence[Piece], dim: int) -> tuple[Piece, ...]:
    """Merge neighbours along ``dim`` that differ only in the source tensor.

    A stack of experts thereby becomes one piece. Only neighbours in the order of ``pieces`` are tried, so
    that the result does not depend on other pieces.
    """
    runs: list[list[Piece]] = []
    for p in pieces:
        if runs and _continues(runs[-1], p, dim):
            runs[-1].append(p)
        else:
            runs.append([p])
    return tuple(run[0] if len(run) == 1 else _as_run(run, dim) for run in runs)


def _continues(run: list[Piece], p: Piece, dim: int) -> bool:
    # Pieces at the same place of different tensors: the tensor's number becomes one more digit above those
    # of ``dim``, with the unit as its stride.
    first = run[0]
    at = first.origin[dim] + len(run) * extent(first.axes[dim])
    return _alike(first, p, (*first.origin[:dim], at, *first.origin[dim + 1 :]))


def _as_run(run: list[Piece], dim: int) -> Piece:
    first = run[0]
    axis = ((len(run), first.unit), *first.axes[dim])
    return replace(
        first,
        axes=(*first.axes[:dim], axis, *first.axes[dim + 1 :]),
        source=tuple(p.source[0] for p in run),
    )


def reshape(pieces: Sequence[Piece], shape: Sequence[int], target: Sequence[int]) -> tuple[Piece, ...]:
    """Regroup the row-major order of ``shape`` as ``target`` (same number of elements).

    Raises ValueError where the regrouping would need more than ``MAX_PIECES`` pieces.
    """
    if tuple(shape) == tuple(target) or not pieces:
        return tuple(pieces)
    out: list[Piece] = []
    groups = _groups(shape, target)
    for p in pieces:
        out += _reshape_piece(p, shape, target, groups)
        if len(out) > MAX_PIECES:
            raise ValueError(f"reshape from {tuple(shape)} to {tuple(target)} scatters into too many pieces")
    return tuple(out)


def _groups(shape: Sequence[int], target: Sequence[int]) -> list[tuple[range, range]]:
    """Match runs of old and new dimensions with equal products, as a view does.

    Different groups are independent: (6, 4) to (2, 3, 4) splits the 6 and keeps the 4.
    """
    groups: list[tuple[range, range]] = []
    i = j = 0
    while i < len(shape) or j < len(target):
        i0, j0 = i, j
        old = new = 1
        if i < len(shape):
            old, i = shape[i], i + 1
        if j < len(target):
            new, j = target[j], j + 1
        while old != new:
            if old < new:
                old, i = old * shape[i], i + 1
            else:
                new, j = new * target[j], j + 1
        # Ones at the end of one side have nothing to match on the other, and go with the last group.
        while i < len(shape) and shape[i] == 1 and j == len(target):
            i += 1
        while j < len(target) and target[j] == 1 and i == len(shape):
            j += 1
        groups.append((range(i0, i), range(j0, j)))
    return groups


def _reshape_piece(
    p: Piece, shape: Sequence[int], target: Sequence[int], groups: list[tuple[range, range]]
) -> list[Piece]:
    choices = []
    for old, new in groups:
        origin = [p.origin[d] for d in old]
        axes = [p.axes[d] for d in old]
        parts = _merge(origin, axes, [shape[d] for d in old])
        choices.append(
            [
                split
                for start, offset, digits in parts
                for split in _split(start, offset, digits, [target[d] for d in new])
            ]
        )
        if prod(len(choice) for choice in choices) > MAX_PIECES:
            raise ValueError(f"reshape from {tuple(shape)} to {tuple(target)} scatters into too many pieces")
    out = []
    for combination in product(*choices):
        origin_out: tuple[int, ...] = ()
        axes_out: tuple[Digits, ...] = ()
        offset = p.offset
        for part_origin, part_offset, part_axes in combination:
            origin_out += part_origin
            axes_out += part_axes
            offset += part_offset
        out.append(replace(p, origin=origin_out, axes=axes_out, offset=offset))
    return out


def _merge(origin: list[int], axes: list[Digits], sizes: list[int]) -> list[tuple[int, int, Digits]]:
    """Return a box as ``(start, offset, digits)`` runs of its joint row-major order.

    It starts at the innermost dimension. The indices of a run are consecutive, its addresses are arbitrary.
    If a dimension is covered whole, the one above it only adds digits; otherwise each row of the one above is
    a separate run.
    """
    if not sizes:
        return [(0, 0, ())]
    parts = [(origin[-1], 0, axes[-1])]
    below = sizes[-1]
    for start, axis, size in zip(
        reversed(origin[:-1]), reversed(axes[:-1]), reversed(sizes[:-1]), strict=True
    ):
        if len(parts) == 1 and extent(parts[0][2]) == below:
            # The inner dimensions are covered whole: one more digit group on top of them.
            _, offset, digits = parts[0]
            parts = [(start * below, offset, (*axis, *digits))]
        elif extent(axis) == 1:
            # A single row only moves the parts; the piece's offset already has its address.
            parts = [(start * below + at, offset, digits) for at, offset, digits in parts]
        else:
            rows = [(i, cut(axis, i, i + 1)[0][1]) for i in range(extent(axis))]
            if len(rows) * len(parts) > MAX_PIECES:
                raise ValueError("reshape scatters a piece into too many parts")
            parts = [
                ((start + i) * below + at, row + offset, digits)
                for i, row in rows
                for at, offset, digits in parts
            ]
        below *= size
    return parts


def _split(
    start: int, offset: int, digits: Digits, sizes: list[int]
) -> list[tuple[tuple[int, ...], int, tuple[Digits, ...]]]:
    """Return a run of a row-major order as boxes: ``(origin, offset, axes)`` of each.

    The boxes are over dimensions of ``sizes``, split off one at a time. Head row, whole rows and tail row are
    separate, since a box has the same columns in each of its rows.
    """
    if not sizes:
        return [((), offset, ())]
    if len(sizes) == 1:
        return [((start,), offset, (digits,))]
    below = prod(sizes[1:])
    count = extent(digits)
    out: list[tuple[tuple[int, ...], int, tuple[Digits, ...]]] = []
    for at, stop in _rows(start, start + count, below):
        for position, part_offset, part in cut(digits, at - start, stop - start):
            index = at + position
            row, column = divmod(index, below)
            halves = split_at(part, below) if extent(part) >= below and column == 0 else None
            if halves is not None:
                # Digits that fall apart at the row's end: all rows alike, in one box.
                for inner_origin, inner_offset, inner_axes in _split(0, 0, halves[1], sizes[1:]):
                    out.append(
                        ((row, *inner_origin), offset + part_offset + inner_offset, (halves[0], *inner_axes))
                    )
            elif column + extent(part) <= below:
                # Within one row, whose dimension then has a single index and no digit.
                for inner_origin, inner_offset, inner_axes in _split(column, 0, part, sizes[1:]):
                    out.append(((row, *inner_origin), offset + part_offset + inner_offset, ((), *inner_axes)))
            else:
                out += _split_rows(index, offset + part_offset, part, sizes)
    return out


def _rows(start: int, stop: int, below: int) -> list[tuple[int, int]]:
    """Cut ``[start, stop)`` into a partial head row, whole rows, and a partial tail row."""
    first_whole = -(-start // below) * below
    last_whole = stop // below * below
    if first_whole >= last_whole:
        cuts = [start, first_whole, stop] if start < first_whole < stop else [start, stop]
    else:
        cuts = [start, first_whole, last_whole, stop]
    return [(a, b) for a, b in pairwise(cuts) if a < b]


def _split_rows(
    start: int, offset: int, digits: Digits, sizes: list[int]
) -> list[tuple[tuple[int, ...], int, tuple[Digits, ...]]]:
    """Row by row: for digits whose boundaries do not fall on row boundaries."""
    below = prod(sizes[1:])
    stop = start + extent(digits)
    if (stop - start) // below > MAX_PIECES:
        raise ValueError("reshape scatters a piece into too many parts")
    out = []
    at = start
    while at < stop:
        until = min(stop, (at // below + 1) * below)
        row, column = divmod(at, below)
        for position, part_offset, part in cut(digits, at - start, until - start):
            for inner_origin, inner_offset, inner_axes in _split(column + position, 0, part, sizes[1:]):
                out.append(((row, *inner_origin), offset + part_offset + inner_offset, ((), *inner_axes)))
        at = until
    return out
