"""Strided copies: which elements of a piece go to which elements of a placed box."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from zerostart.geometry.digits import cut, extent
from zerostart.geometry.pieces import Piece

# Boxes of an index space, and row-major ranges as boxes.


@dataclass(frozen=True, slots=True)
class Box:
    """The indices ``origin <= index < origin + extent`` of a tensor."""

    origin: tuple[int, ...]
    extent: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.extent)


def row_major_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Disjoint boxes, in order, that cover the elements ``[start, stop)`` of the row-major order.

    At most ``2 * ndim - 1`` of them: a partial head and tail for each dimension, whole rows between.
    """
    if stop <= start:
        return []
    if not shape:
        return [Box((), ())]
    below = prod(shape[1:])
    first, head = divmod(start, below)
    last, tail = divmod(stop, below)

    def inside(row: int, lo: int, hi: int) -> list[Box]:
        return [Box((row, *box.origin), (1, *box.extent)) for box in row_major_boxes(shape[1:], lo, hi)]

    if first == last:
        return inside(first, head, tail)
    boxes: list[Box] = []
    if head:
        boxes += inside(first, head, below)
        first += 1
    if first < last:
        boxes.append(Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])))
    if tail:
        boxes += inside(last, 0, tail)
    return boxes


#: ``(size, source stride, destination stride)`` of one loop.
Loop = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements of one source tensor to elements of one destination, as nested loops."""

    #: The tensor's name, or a computed tensor.
    source: object
    #: Address of the first element in the source.
    start: int
    #: Address of the first element in the destination.
    to: int
    #: From the largest source stride to the smallest; no loops: one element.
    loops: tuple[Loop, ...]

    @property
    def numel(self) -> int:
        """Number of elements copied."""
        return prod(size for size, _, _ in self.loops)


def is_one_run(loops: Sequence[Loop]) -> bool:
    """Return True for one run without gaps on both sides."""
    return not loops or (len(loops) == 1 and loops[0][1:] == (1, 1))


def merge_runs(copies: Iterable[Copy]) -> list[Copy]:
    """Join unbroken runs that continue each other on both sides.

    The result is sorted by source and address.
    """
    out: list[Copy] = []
    ordered = list(copies)
    if len(ordered) > 1:
        ordered.sort(key=lambda c: (str(c.source), c.start))
    for copy in ordered:
        last = out[-1] if out else None
        if (
            last is not None
            and last.source == copy.source
            and is_one_run(last.loops)
            and is_one_run(copy.loops)
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
    # Address in the source, address in the destination, loops: of each combination of the axes' parts.
    partial: list[tuple[int, int, list[Loop]]] = [(piece.offset, to, [])]
    for axis, origin, box_origin, box_extent, stride in zip(
        piece.axes, piece.origin, box.origin, box.extent, strides, strict=True
    ):
        low = max(origin, box_origin)
        high = min(origin + extent(axis), box_origin + box_extent)
        if low >= high:
            return
        base = low - box_origin
        parts = [
            (offset, (base + position) * stride, _with_destination(digits, stride))
            for position, offset, digits in cut(axis, low - origin, high - origin)
        ]
        partial = [
            (start + offset, target + place, [*loops, *inner])
            for start, target, loops in partial
            for offset, place, inner in parts
        ]
    for start, target, loops in partial:
        yield from _per_tensor(piece, start, target, loops)


def _with_destination(digits: Sequence[tuple[int, int]], stride: int) -> list[Loop]:
    loops: list[Loop] = []
    below = 1
    for size, source_stride in reversed(digits):
        if size > 1:
            loops.append((size, source_stride, stride * below))
        below *= size
    loops.reverse()
    return loops


def _per_tensor(piece: Piece, start: int, to: int, loops: list[Loop]) -> Iterator[Copy]:
    # A stride of a unit or more steps from tensor to tensor: such a loop becomes one copy for each tensor.
    across = [loop for loop in loops if loop[1] >= piece.unit]
    within = _merge([loop for loop in loops if loop[1] < piece.unit])
    places = [(start, to)]
    for size, source, destination in across:
        places = [(at + i * source, go + i * destination) for at, go in places for i in range(size)]
    for address, target in places:
        # Addresses of a run count through all of its tensors.
        number, inside = divmod(address, piece.unit)
        yield Copy(piece.source[number], inside, target, within)


def _merge(loops: list[Loop]) -> tuple[Loop, ...]:
    out: list[Loop] = []
    for size, source, destination in sorted(loops, key=lambda loop: (-loop[1], -loop[2])):
        if out and out[-1][1] == source * size and out[-1][2] == destination * size:
            out[-1] = (out[-1][0] * size, source, destination)
        else:
            out.append((size, source, destination))
    return tuple(out)
