"""Whether what a format has found is whole: each tensor comes from bytes that are its own, all of it, once.

The one place that proves it, whatever the format: a reader may be wrong about a damaged directory, and
memory that nothing wrote is never taken for weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from zerostart.checkpoint.catalog import DTYPE_BITS, Assembled, TensorEntry
from zerostart.checkpoint.strict_json import shown
from zerostart.errors import CheckpointError
from zerostart.geometry import Piece
from zerostart.geometry.boxes import row_major_strides

#: Most pairs of pieces of one tensor that are compared, where no shorter way says that they tile it.
_MOST_PAIRS = 1 << 22


def check_whole(
    tensors: Mapping[str, TensorEntry], assembled: Mapping[str, Assembled], sizes: Sequence[int]
) -> None:
    """Raise CheckpointError, naming the tensor, unless everything lies where it is said to.

    That is: each stored tensor inside its file, of which ``sizes`` has the bytes; each piece inside the
    tensor that it is of and inside the one that it fills; and the pieces of a tensor tile its shape.
    """
    for entry in tensors.values():
        _check_stored(entry, sizes)
    for tensor in assembled.values():
        _check_assembled(tensor, tensors)


def _check_stored(entry: TensorEntry, sizes: Sequence[int]) -> None:
    strides = row_major_strides(entry.shape) if entry.strides is None else entry.strides
    right = (
        entry.dtype in DTYPE_BITS
        and 0 <= entry.file < len(sizes)
        and len(strides) == len(entry.shape)
        and entry.offset >= 0
        and all(size >= 0 for size in entry.shape)
        and all(stride >= 0 for stride in strides)
    )
    if not right:
        raise CheckpointError(f"tensor {shown(entry.name)} has an impossible offset, shape or strides")
    if not entry.numel:
        return
    span = 1 + sum((size - 1) * stride for size, stride in zip(entry.shape, strides, strict=True))
    if entry.offset + span * DTYPE_BITS[entry.dtype] // 8 > sizes[entry.file]:
        raise CheckpointError(f"tensor {shown(entry.name)} is said to reach beyond the end of its file")


def _check_assembled(tensor: Assembled, tensors: Mapping[str, TensorEntry]) -> None:
    shape, name = tensor.shape, shown(tensor.name)
    if any(type(size) is not int or size < 0 for size in shape):
        raise CheckpointError(f"tensor {name} has an invalid shape")
    for piece in tensor.pieces:
        ends = [at + size for at, size in zip(piece.origin, piece.extent, strict=True)]
        if len(ends) != len(shape) or any(
            at < 0 or end > size for at, end, size in zip(piece.origin, ends, shape, strict=True)
        ):
            raise CheckpointError(f"tensor {name} of shape {list(shape)} has a part that reaches out of it")
        if not _within_source(piece, tensor.dtype, tensors):
            raise CheckpointError(f"a part of tensor {name} is said to lie outside of what is stored of it")
    have = sum(piece.numel for piece in tensor.pieces)
    if have != prod(shape):
        raise CheckpointError(
            f"tensor {name} has {prod(shape)} elements, and the files hold {have} of it: a file is missing, "
            "is there twice, or belongs to another job"
        )
    if len(tensor.pieces) > 1 and not _apart(tensor.pieces, shape):
        raise CheckpointError(
            f"two parts of tensor {name} fill the same elements, and other elements are not filled: the "
            "files belong to two jobs, or are damaged"
        )


def _within_source(piece: Piece, dtype: str, tensors: Mapping[str, TensorEntry]) -> bool:
    """Whether every address of a piece is one of a stored tensor of ``dtype``."""
    unit = piece.unit
    if piece.offset < 0 or unit < 1:
        return False
    number, last = divmod(piece.offset, unit)
    for size, stride in (digit for axis in piece.axes for digit in axis):
        if stride < 0:
            return False
        if stride >= unit:  # from tensor to tensor
            if stride % unit:
                return False
            number += (size - 1) * (stride // unit)
        else:
            last += (size - 1) * stride
    if last >= unit or number >= len(piece.source):
        return False
    for source in piece.source:
        entry = tensors.get(str(source))
        if entry is None or entry.dtype != dtype or not entry.numel:
            return False
        if unit > entry.pieces[0].unit:
            return False
    return True


def _apart(pieces: Sequence[Piece], shape: Sequence[int]) -> bool:
    """Whether no two of the pieces, which lie inside the shape, have an element in common."""
    from zerostart.geometry.tiling import tiles  # numpy, which a catalog alone does without

    strides = row_major_strides(shape)
    boxes = [(piece.origin, piece.extent) for piece in pieces]
    fragments = [
        (sum(map(_times, origin, strides)), tuple(zip(extent, strides, strict=True)))
        for origin, extent in boxes
    ]
    if tiles(fragments, prod(shape)):
        return True
    boxes.sort()
    pairs = 0
    for number, (origin, extent) in enumerate(boxes):
        for other, size in boxes[number + 1 :]:
            if origin and other[0] >= origin[0] + extent[0]:
                break
            pairs += 1
            if pairs > _MOST_PAIRS:
                return False
            if all(a < b + m and b < a + n for a, n, b, m in zip(origin, extent, other, size, strict=True)):
                return False
    return True


def _times(a: int, b: int) -> int:
    return a * b
