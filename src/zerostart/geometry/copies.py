"""The join of a piece (where elements come from) and a placed box (where they go): strided copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from zerostart.geometry.boxes import Box
from zerostart.geometry.digits import cut, extent
from zerostart.geometry.pieces import Piece

__all__ = ["Copy", "Loop", "copies_between", "merge_runs"]

#: ``(size, source stride, destination stride)`` of one loop.
Loop = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements of one source tensor to elements of one destination, as nested loops.

    ``source`` is the tensor's name; ``start`` and ``to`` are the first element's address in the source and
    in the destination; ``loops`` go from the largest source stride to the smallest. No loops: one element.
    """

    source: object
    start: int
    to: int
    loops: tuple[Loop, ...]

    @property
    def numel(self) -> int:
        """Number of elements copied."""
        return prod(size for size, _, _ in self.loops)

    @property
    def contiguous(self) -> bool:
        """Whether source and destination are each one unbroken run, in the same order."""
        return not self.loops or (len(self.loops) == 1 and self.loops[0][1:] == (1, 1))

    @property
    def span(self) -> int:
        """Elements from the first to the last one read, both included."""
        return 1 + sum((size - 1) * stride for size, stride, _ in self.loops)


def merge_runs(copies: Iterable[Copy]) -> list[Copy]:
    """Join unbroken runs that continue each other on both sides; sorted by source and address."""
    out: list[Copy] = []
    for copy in sorted(copies, key=lambda c: (str(c.source), c.start)):
        last = out[-1] if out else None
        if (
            last is not None
            and last.source == copy.source
            and last.contiguous
            and copy.contiguous
            and (last.start + last.numel, last.to + last.numel) == (copy.start, copy.to)
        ):
            out[-1] = Copy(last.source, last.start, last.to, ((last.numel + copy.numel, 1, 1),))
        else:
            out.append(copy)
    return out


def copies_between(piece: Piece, box: Box, to: int, strides: Sequence[int]) -> Iterator[Copy]:
    """The copies that fill the part of ``box`` that ``piece`` covers.

    The destination of the box's element ``origin + index`` is ``to + sum(index * strides)``.
    """
    parts = []
    for d, axis in enumerate(piece.axes):
        low = max(piece.origin[d], box.origin[d])
        high = min(piece.origin[d] + extent(axis), box.origin[d] + box.extent[d])
        if low >= high:
            return
        here = low - piece.origin[d]
        base = low - box.origin[d]
        parts.append(
            [
                (offset, (base + position) * strides[d], _with_destination(digits, strides[d]))
                for position, offset, digits in cut(axis, here, high - piece.origin[d])
            ]
        )
    for combination in product(*parts):
        start = piece.offset + sum(part[0] for part in combination)
        target = to + sum(part[1] for part in combination)
        loops = [loop for part in combination for loop in part[2]]
        yield from _per_tensor(piece, start, target, loops)


def _with_destination(digits: Sequence[tuple[int, int]], stride: int) -> list[Loop]:
    """Give each digit its stride in the destination: the axis stride times the elements below it."""
    loops: list[Loop] = []
    below = 1
    for size, source_stride in reversed(digits):
        if size > 1:
            loops.append((size, source_stride, stride * below))
        below *= size
    loops.reverse()
    return loops


def _per_tensor(piece: Piece, start: int, to: int, loops: list[Loop]) -> Iterator[Copy]:
    """Resolve the loops that step over the tensors of a run; what is left stays inside one tensor."""
    across = [loop for loop in loops if loop[1] >= piece.unit]
    within = _merge([loop for loop in loops if loop[1] < piece.unit])
    for indices in product(*(range(size) for size, _, _ in across)):
        address = start + sum(i * loop[1] for i, loop in zip(indices, across, strict=True))
        target = to + sum(i * loop[2] for i, loop in zip(indices, across, strict=True))
        number, inside = divmod(address, piece.unit)
        yield Copy(piece.source[number], inside, target, within)


def _merge(loops: list[Loop]) -> tuple[Loop, ...]:
    """Order loops by source stride and join neighbours that are one loop on both sides."""
    out: list[Loop] = []
    for size, source, destination in sorted(loops, key=lambda loop: (-loop[1], -loop[2])):
        if out and out[-1][1] == source * size and out[-1][2] == destination * size:
            out[-1] = (out[-1][0] * size, source, destination)
        else:
            out.append((size, source, destination))
    return tuple(out)
