"""Tensors out of the shares that the ranks of a job wrote: the geometry of what others save."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from zerostart import geometry
from zerostart.checkpoint.catalog import DTYPE_BITS, Assembled, TensorEntry
from zerostart.checkpoint.strict_json import shown
from zerostart.errors import CheckpointError
from zerostart.geometry import Piece


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
            if first + count > entry.numel:
                raise CheckpointError(
                    f"tensor {shown(name)} needs {first + count} elements of {shown(entry.name)}, which has "
                    f"{entry.numel}: the file is truncated, or belongs to another job"
                )
            if entry.strides is not None:
                raise CheckpointError(f"tensor {shown(name)}: {shown(entry.name)} is not stored as one row")
            stored = geometry.whole(entry.name, (entry.numel,))
            parts.append((geometry.crop(stored, 0, first, first + count), count))
            have += count
    if have < total:
        raise CheckpointError(
            f"tensor {shown(name)} has {total} elements, and the files hold {have} of them: one is missing, "
            "or was written by another number of ranks"
        )
    flat = geometry.concatenate(parts, 0)
    return Assembled(name, dtype, tuple(shape), geometry.reshape(flat, (total,), shape))


def from_boxes(
    name: str, shape: Sequence[int], dtype: str, boxes: Iterable[tuple[TensorEntry, Sequence[int]]]
) -> Assembled:
    """A tensor that stored boxes tile, each with its origin; whether they do, ``check_whole`` says.

    Raises CheckpointError for a box of another type.
    """
    pieces: list[Piece] = []
    for entry, origin in boxes:
        _check_dtype(name, dtype, entry)
        part = geometry.whole(entry.name, entry.shape, entry.strides)
        for dim, at in enumerate(origin):
            part = geometry.shift(part, dim, at)
        pieces += part
    return Assembled(name, dtype, tuple(shape), tuple(pieces))


def _check_dtype(name: str, dtype: str, entry: TensorEntry) -> None:
    if entry.dtype != dtype or dtype not in DTYPE_BITS:
        raise CheckpointError(f"tensor {shown(name)} is {dtype}, and a part of it is stored as {entry.dtype}")
