"""Tensors out of the shares that the ranks of a job wrote: the geometry of what others save."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from zerostart import geometry
from zerostart.checkpoint.catalog import DTYPE_BITS, Assembled, TensorEntry
from zerostart.errors import CheckpointError
from zerostart.geometry import Piece

__all__ = ["from_boxes", "from_runs"]


def from_runs(
    name: str, shape: Sequence[int], dtype: str, runs: Iterable[tuple[TensorEntry, int, int]]
) -> Assembled:
    """A tensor whose row-major order is ``runs`` of stored rows, one after the other.

    A run is the stored tensor (1-D), its first element that counts, and the number of elements. What is left
    over at the end of the last run is padding. Raises CheckpointError where the runs are too short.
    """
    total = prod(shape)
    parts: list[tuple[tuple[Piece, ...], int]] = []
    have = 0
    for entry, first, count in runs:
        count = min(count, total - have)
        if count > 0:
            _check_dtype(name, dtype, entry)
            stored = geometry.whole(entry.name, (entry.numel,))
            parts.append((geometry.crop(stored, 0, first, first + count), count))
            have += count
    if have < total:
        raise CheckpointError(
            f"tensor {name!r} has {total} elements, and the files hold {have} of them: one is missing, or "
            "was written by another number of ranks"
        )
    flat = geometry.concatenate(parts, 0)
    return Assembled(name, dtype, tuple(shape), geometry.reshape(flat, (total,), shape))


def from_boxes(
    name: str, shape: Sequence[int], dtype: str, boxes: Iterable[tuple[TensorEntry, Sequence[int]]]
) -> Assembled:
    """A tensor that stored boxes tile, each with its origin. Raises CheckpointError where they do not."""
    pieces: list[Piece] = []
    covered = 0
    for entry, origin in boxes:
        _check_dtype(name, dtype, entry)
        ends = [o + n for o, n in zip(origin, entry.shape, strict=True)]
        if any(end > size for end, size in zip(ends, shape, strict=True)):
            raise CheckpointError(f"tensor {name!r} of shape {list(shape)} has a part that reaches out of it")
        part = geometry.whole(entry.name, entry.shape, entry.strides)
        for dim, at in enumerate(origin):
            part = geometry.shift(part, dim, at)
        pieces += part
        covered += entry.numel
    if covered != prod(shape) or _overlap(pieces):
        raise CheckpointError(
            f"tensor {name!r} has {prod(shape)} elements, and the files hold {covered} of it: one is "
            "missing, or is of another job"
        )
    return Assembled(name, dtype, tuple(shape), tuple(pieces))


def _check_dtype(name: str, dtype: str, entry: TensorEntry) -> None:
    if entry.dtype != dtype or dtype not in DTYPE_BITS:
        raise CheckpointError(f"tensor {name!r} is {dtype}, and a part of it is stored as {entry.dtype}")


def _overlap(pieces: Sequence[Piece]) -> bool:
    """Whether two boxes have an element in common; ``pieces`` are at most as many as ranks."""
    ordered = sorted(pieces, key=lambda p: p.origin)
    return any(
        all(
            a < b + m and b < a + n for a, n, b, m in zip(p.origin, p.extent, q.origin, q.extent, strict=True)
        )
        for number, p in enumerate(ordered)
        for q in _until(ordered[number + 1 :], p)
    )


def _until(following: Sequence[Piece], piece: Piece) -> Iterable[Piece]:
    """Those that begin, along the first dimension, before ``piece`` ends."""
    for other in following:
        if piece.origin and other.origin[0] >= piece.origin[0] + piece.extent[0]:
            return
        yield other
