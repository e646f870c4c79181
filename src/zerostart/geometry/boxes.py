"""Boxes of an index space, and row-major ranges as boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Box:
    """The indices ``origin <= index < origin + extent`` of a tensor."""

    origin: tuple[int, ...]
    extent: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.extent)


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor of ``shape``."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


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
