"""One rank's share of one parameter.

A layout lists boxes of the unsharded parameter with the place of each in the rank's local storage, which
is one row of elements. What no box covers is padding and holds zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from zerostart.geometry import Box, copies_between, row_major_boxes, row_major_strides, whole


@dataclass(frozen=True, slots=True)
class LocalBox:
    """A box of the parameter; its element ``origin + index`` lies at ``to + sum(index * strides)``."""

    box: Box
    #: Element of the local storage.
    to: int
    #: In elements of the local storage.
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """One rank's share of a parameter."""

    #: Of the unsharded parameter.
    shape: tuple[int, ...]
    #: Elements of the local storage, padding included.
    numel: int
    #: How many of them, from the first on, are real.
    owned: int
    #: Disjoint; what none of them covers is padding.
    boxes: tuple[LocalBox, ...]

    def part(self, number: int, count: int) -> Layout:
        """Part ``number`` of ``count`` nearly equal ones without overlap; the storage stays the same."""
        # Parts are of the elements that the boxes hold, in their order: all who hold the share cut it at the
        # same places.
        total = sum(placed.box.numel for placed in self.boxes)
        first, stop = total * number // count, total * (number + 1) // count
        kept: list[LocalBox] = []
        begin = 0
        for placed in self.boxes:
            box, end = placed.box, begin + placed.box.numel
            for inner in row_major_boxes(box.extent, max(first - begin, 0), min(stop, end) - begin):
                origin = tuple(a + b for a, b in zip(box.origin, inner.origin, strict=True))
                moved = sum(o * s for o, s in zip(inner.origin, placed.strides, strict=True))
                kept.append(LocalBox(Box(origin, inner.extent), placed.to + moved, placed.strides))
            begin = end
        return Layout(self.shape, self.numel, stop - first, tuple(kept))

    def runs(self) -> list[tuple[int, int, int]]:
        """The share as unbroken runs ``(first element of the row-major order, count, place in storage)``."""
        runs: list[tuple[int, int, int]] = []
        for placed in self.boxes:
            for piece in whole("", self.shape):
                for copy in copies_between(piece, placed.box, placed.to, placed.strides):
                    # A piece that is the parameter itself: addresses in it are places in the row-major order.
                    runs += _unrolled(copy.start, copy.to, copy.loops)
        return runs


def flat_partition(shape: Sequence[int], rank: int, world_size: int) -> Layout:
    """DeepSpeed's ZeRO-3 partition: the row-major order cut into ``world_size`` equal runs.

    The order is padded at its end to a multiple of ``world_size``; the padding falls on the last ranks, some
    of which may own nothing. Source: ``partition_parameters.py`` of DeepSpeed, ``_aligned_size`` and
    ``_partition_param``.
    """
    total = prod(shape)
    # Rounded up: all ranks have room for as many elements, the last ones real ones for fewer.
    size = -(-total // world_size)
    start, stop = min(rank * size, total), min((rank + 1) * size, total)
    strides = row_major_strides(shape)
    placed = []
    for box in row_major_boxes(shape, start, stop):
        first = sum(o * s for o, s in zip(box.origin, strides, strict=True))
        # The parameter's own strides: within the run, storage follows its row-major order.
        placed.append(LocalBox(box, first - start, strides))
    return Layout(tuple(shape), size, stop - start, tuple(placed))


def dimension_shard(shape: Sequence[int], dim: int, rank: int, world_size: int) -> Layout:
    """DTensor's ``Shard(dim)``: chunks of ``ceil(n / world_size)`` along ``dim``, the last short or empty.

    The local storage has the size of a full chunk on every rank, as FSDP2 keeps it for its collectives. A
    parameter without dimensions is whole on each.
    """
    if not shape:
        return replicated(shape)
    chunk = -(-shape[dim] // world_size)
    start, stop = min(rank * chunk, shape[dim]), min((rank + 1) * chunk, shape[dim])
    padded = (*shape[:dim], chunk, *shape[dim + 1 :])
    local = (*shape[:dim], stop - start, *shape[dim + 1 :])
    boxes: tuple[LocalBox, ...] = ()
    if prod(local):
        origin = (0,) * dim + (start,) + (0,) * (len(shape) - dim - 1)
        boxes = (LocalBox(Box(origin, local), 0, row_major_strides(local)),)
    return Layout(tuple(shape), prod(padded), prod(local), boxes)


def replicated(shape: Sequence[int]) -> Layout:
    """The whole parameter on every rank."""
    total = prod(shape)
    box = LocalBox(Box((0,) * len(shape), tuple(shape)), 0, row_major_strides(shape))
    return Layout(tuple(shape), total, total, (box,) if total else ())


def _unrolled(start: int, to: int, loops: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    if not loops:
        return [(start, 1, to)]
    size, source, destination = loops[0]
    if len(loops) == 1 and source == destination == 1:
        return [(start, size, to)]
    return [
        run for i in range(size) for run in _unrolled(start + i * source, to + i * destination, loops[1:])
    ]
