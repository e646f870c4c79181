"""What a directory of a training run holds, whoever wrote it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeGuard

from zerostart import geometry
from zerostart.checkpoint.catalog import DTYPE_BITS, Assembled, TensorEntry
from zerostart.checkpoint.formats.inert_pickle import MAX_DIMENSIONS
from zerostart.checkpoint.strict_json import DAMAGED, shown
from zerostart.errors import CheckpointError
from zerostart.geometry import Piece

#: What separates the name of an optimizer's state from that of its parameter in ``assembled``.
STATE = ":"


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number that was saved as a tensor without dimensions, and its type in safetensors' spelling."""

    value: float
    dtype: str


@dataclass(frozen=True)
class ParameterGroup:
    """One parameter group of an optimizer: its ``settings`` as they were pickled, and its parameters.

    A setting that was a tensor without dimensions is a ``Scalar``.
    """

    settings: dict[str, Any]
    parameters: tuple[str, ...]


@dataclass
class TrainingContents:
    """Stored tensors, what they make up, and what is no tensor."""

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    #: Weights by their names, and states of an optimizer as ``exp_avg:NAME`` and the like.
    assembled: dict[str, Assembled] = field(default_factory=dict)
    #: States that are one number, by key and parameter.
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)
    groups: list[ParameterGroup] = field(default_factory=list)
    #: Counters of the engine, by its own names.
    engine: dict[str, Any] = field(default_factory=dict)
    #: State of the schedule of learning rates; None where none was saved.
    schedule: dict[str, Any] | None = None
    #: Other names of weights, and the names that they are stored under.
    ties: dict[str, str] = field(default_factory=dict)

    def add(self, entries: Iterable[TensorEntry]) -> None:
        """Note stored tensors."""
        self.tensors.update((entry.name, entry) for entry in entries)


def is_shape(value: Any) -> TypeGuard[tuple[int, ...]]:
    """Whether what a pickle holds is the sizes of a tensor."""
    few = type(value) is tuple and len(value) <= MAX_DIMENSIONS  # one of millions may be that of each box
    return few and all(type(size) is int and size >= 0 for size in value)


def names_of(value: Any) -> tuple[str, ...]:
    """Names out of a pickle; a number is one as well. Raises CheckpointError for anything else."""
    if type(value) not in (list, tuple) or any(type(name) not in (str, int) for name in value):
        raise CheckpointError(f"the parameters of an optimizer group have no names: {DAMAGED}")
    return tuple(map(str, value))


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
        # The last run may go on into padding, or into the next parameter of a flat buffer.
        count = min(count, total - have)
        if count > 0:
            _check_dtype(name, dtype, entry)
            # Before a piece is made of it: a truncated file is named here, and not met in the middle of a
            # read.
            if first + count > entry.numel:
                raise CheckpointError(
                    f"tensor {shown(name)} needs {first + count} elements of {shown(entry.name)}, which has "
                    f"{entry.numel}: the file is truncated, or belongs to another job"
                )
            if entry.strides is not None:
                raise CheckpointError(
                    f"tensor {shown(name)}: {shown(entry.name)} is not stored as one contiguous row, and is "
                    "not read: the file was not written as this format is"
                )
            stored = geometry.whole(entry.name, (entry.numel,))
            parts.append((geometry.crop(stored, 0, first, first + count), count))
            have += count
    if have < total:
        raise CheckpointError(
            f"tensor {shown(name)} has {total} elements, but the files hold {have} of them: a file is "
            "missing, or the files were written by another number of ranks"
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
        raise CheckpointError(
            f"tensor {shown(name)} is {dtype}, but a part of it is stored as {entry.dtype}: files of "
            "two jobs are mixed, or one is damaged"
        )


#: Maximum number of pairs of pieces of one tensor that are compared.
_MOST_PAIRS = 1 << 22


# Memory that nothing wrote is never taken for weights, however wrong a reader is about a damaged directory.
def check_whole(assembled: Mapping[str, Assembled]) -> None:
    """Raise CheckpointError, naming the tensor, unless the pieces of each tensor tile its shape."""
    for tensor in assembled.values():
        shape, name = tensor.shape, shown(tensor.name)
        for piece in tensor.pieces:
            sizes = zip(piece.origin, piece.extent, shape, strict=True)
            if any(at < 0 or at + count > size for at, count, size in sizes):
                raise CheckpointError(
                    f"tensor {name} of shape {list(shape)} has a part that lies outside that shape"
                )
        # As many elements as the shape has, and none twice: then every element is there.
        have = sum(piece.numel for piece in tensor.pieces)
        if have != prod(shape):
            raise CheckpointError(
                f"tensor {name} has {prod(shape)} elements, but the files hold {have}: a file is missing, "
                "is there twice, or belongs to another job"
            )
        if len(tensor.pieces) > 1 and not _apart(tensor.pieces):
            raise CheckpointError(
                f"two parts of tensor {name} fill the same elements, and other elements stay empty: the "
                "files belong to two jobs, or are damaged"
            )


def _apart(pieces: Sequence[Piece]) -> bool:
    """Return whether no two of the pieces have an element in common."""
    # In the order of their first dimension: a box is compared with those that begin before it ends.
    boxes = sorted((piece.origin, piece.extent) for piece in pieces)
    pairs = 0
    for number, (origin, extent) in enumerate(boxes):
        for other, size in itertools.islice(boxes, number + 1, None):
            if origin and other[0] >= origin[0] + extent[0]:
                break
            pairs += 1
            if pairs > _MOST_PAIRS:  # a hostile directory may hold millions of boxes
                return False
            if all(a < b + m and b < a + n for a, n, b, m in zip(origin, extent, other, size, strict=True)):
                return False
    return True
