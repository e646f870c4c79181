"""One rank's share of one parameter.

A layout lists boxes of the unsharded parameter with the place of each in the rank's local storage, which is
one row of elements. Elements outside all boxes are padding and hold zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import gcd, prod

from zerostart.geometry import Box, copies_between, row_major_boxes, row_major_strides, whole


@dataclass(frozen=True, slots=True)
class LocalBox:
    """A box of the parameter, and its place in the local storage.

    Element ``origin + index`` of the box is stored at ``to + sum(index * strides)``.
    """

    box: Box
    #: Element of the local storage.
    to: int
    #: Strides in elements of the local storage.
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """One rank's share of a parameter."""

    #: Shape of the unsharded parameter.
    shape: tuple[int, ...]
    #: Elements of the local storage, padding included.
    numel: int
    #: Number of real elements, which come first.
    owned: int
    #: Disjoint boxes; uncovered elements of the storage are padding.
    boxes: tuple[LocalBox, ...]

    def part(self, number: int, count: int) -> Layout:
        """Return part ``number`` of ``count`` nearly equal parts in the same storage."""
        # Parts divide the elements of the boxes in order, so that all holders of the share cut it alike.
        total = sum(placed.box.numel for placed in self.boxes)
        first, stop = total * number // count, total * (number + 1) // count
        parts: list[LocalBox] = []
        begin = 0
        for placed in self.boxes:
            box, end = placed.box, begin + placed.box.numel
            for inner in row_major_boxes(box.extent, max(first - begin, 0), min(stop, end) - begin):
                origin = tuple(a + b for a, b in zip(box.origin, inner.origin, strict=True))
                offset = sum(o * s for o, s in zip(inner.origin, placed.strides, strict=True))
                parts.append(LocalBox(Box(origin, inner.extent), placed.to + offset, placed.strides))
            begin = end
        return Layout(self.shape, self.numel, stop - first, tuple(parts))

    def runs(self) -> list[tuple[int, int, int]]:
        """Return the share as unbroken runs.

        Each is ``(first element of the row-major order, count, place in storage)``.
        """
        runs: list[tuple[int, int, int]] = []
        for placed in self.boxes:
            for piece in whole("", self.shape):
                for copy in copies_between(piece, placed.box, placed.to, placed.strides):
                    # A piece that is the parameter itself: addresses in it are places in the row-major order.
                    runs += _unroll(copy.start, copy.to, copy.loops)
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
    return replace(flat_run(shape, min(rank * size, total), min((rank + 1) * size, total)), numel=size)


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


def _unroll(start: int, to: int, loops: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    if not loops:
        return [(start, 1, to)]
    size, source, destination = loops[0]
    if len(loops) == 1 and source == destination == 1:
        return [(start, size, to)]
    return [run for i in range(size) for run in _unroll(start + i * source, to + i * destination, loops[1:])]


# One rank's local tensor of a parameter that a mesh axis cuts, before the engine shards it further.


@dataclass(frozen=True, slots=True)
class Section:
    """One rank's local tensor of a parameter.

    It has several boxes where a fused parameter (gate and up, or query, key and value) is cut part by part:
    each rank has its share of every part, and they lie together in its tensor.
    """

    #: The parameter's shape.
    whole: tuple[int, ...]
    #: Shape of the local tensor.
    shape: tuple[int, ...]
    #: Boxes of the parameter, each with its origin in the local tensor; none if the rank has no part.
    boxes: tuple[tuple[Box, tuple[int, ...]], ...]

    def expand(self, layout: Layout) -> Layout:
        """Convert a layout of the local tensor to a layout of the parameter.

        Raises ValueError for a layout of another shape.
        """
        if layout.shape != self.shape:
            raise ValueError(f"a layout of shape {layout.shape} does not fit a section of shape {self.shape}")
        placed = []
        for inner in layout.boxes:
            for origin, start, extent in self._overlaps(inner.box):
                # The storage does not move: the offset of the part in the inner box is its offset in the
                # storage.
                offset = sum(
                    (s - o) * t for s, o, t in zip(start, inner.box.origin, inner.strides, strict=True)
                )
                placed.append(LocalBox(Box(origin, extent), inner.to + offset, inner.strides))
        return Layout(self.whole, layout.numel, layout.owned, tuple(placed))

    def _overlaps(self, local: Box) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
        for box, place in self.boxes:
            low = tuple(max(a, b) for a, b in zip(local.origin, place, strict=True))
            high = tuple(
                min(a + n, b + m)
                for a, n, b, m in zip(local.origin, local.extent, place, box.extent, strict=True)
            )
            extent = tuple(h - s for s, h in zip(low, high, strict=True))
            if all(n > 0 for n in extent):
                yield tuple(o + s - p for o, s, p in zip(box.origin, low, place, strict=True)), low, extent


def whole_section(shape: Sequence[int]) -> Section:
    """Return the whole parameter as a section, also one without dimensions."""
    return ranged_section(shape, 0, [(0, shape[0])]) if shape else Section((), (), ((Box((), ()), ()),))


def packed_section(shape: Sequence[int], dim: int, parts: Sequence[int], rank: int, size: int) -> Section:
    """Chunk each fused part of ``dim`` by itself, and fuse the chunks of a rank.

    ``parts`` are the sizes of the parts. Equal parts that divide evenly are DTensor's ``_StridedShard(dim,
    split_factor=len(parts))``. Raises ValueError if the parts do not add up to the dimension.
    """
    if sum(parts) != shape[dim]:
        raise ValueError(
            f"parts of the sizes {tuple(parts)} do not add up to the {shape[dim]} elements of dimension {dim}"
        )
    ranges = []
    for first, length in zip(accumulate(parts, initial=0), parts, strict=False):
        # Chunks as in ``torch.chunk``: all as long as the first, so that the last may be empty.
        step = -(-length // size)
        low, high = min(rank * step, length), min((rank + 1) * step, length)
        ranges.append((first + low, first + high))
    return ranged_section(shape, dim, ranges)


def ranged_section(shape: Sequence[int], dim: int, ranges: Sequence[tuple[int, int]]) -> Section:
    """Return the section with these index ranges of ``dim``, one after the other."""
    dim %= len(shape)
    head, tail = tuple(shape[:dim]), tuple(shape[dim + 1 :])
    boxes, at = [], 0
    for low, high in ranges:
        place = (0,) * dim + (at,) + (0,) * len(tail)
        box = Box((0,) * dim + (low,) + (0,) * len(tail), (*head, high - low, *tail))
        # A rank without a part of the parameter has no boxes.
        if prod(box.extent):
            boxes.append((box, place))
        at += high - low
    return Section(tuple(shape), (*head, at, *tail), tuple(boxes))


# Flat buffers: parameters one after the other in one buffer, as ZeRO stages 1 and 2 keep a group of them.

#: A partition begins at a multiple of this many elements (DeepSpeed's ``nccl_start_alignment_factor``).
START_ALIGNMENT = 2
#: Bytes that ``parameter_alignment`` aligns each parameter to.
PARAMETER_BYTES = 16


@dataclass(frozen=True, slots=True)
class FlatRules:
    """Rules by which an optimizer over ``partitions`` ranks flattens a group."""

    partitions: int
    round_robin: bool = False
    aligned: bool = False

    def group(self, numels: Sequence[int], itemsize: int) -> FlatGroup:
        """Flatten parameters with ``numels`` elements in the optimizer's order."""
        order = _deal_round_robin(len(numels), self.partitions) if self.round_robin else range(len(numels))
        # In elements: a multiple of it is a multiple of PARAMETER_BYTES.
        step = PARAMETER_BYTES // gcd(PARAMETER_BYTES, itemsize) if self.aligned else 1
        offsets, end = [0] * len(numels), 0
        for position in order:
            # Only the padding of the group follows the last parameter.
            end += -end % step
            offsets[position] = end
            end += numels[position]
        whole = START_ALIGNMENT * self.partitions
        return FlatGroup(tuple(offsets), tuple(numels), end + -end % whole)


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """Parameters in one flat buffer of ``numel`` elements; gaps between them are zero."""

    offsets: tuple[int, ...]
    numels: tuple[int, ...]
    numel: int

    def share(self, place: int, shape: Sequence[int], partitions: int) -> Callable[[int], Layout]:
        """Return the layout of each rank's part of parameter number ``place``."""
        offset, numel, size = self.offsets[place], self.numels[place], self.numel // partitions
        nothing = flat_run(shape, 0, 0)  # of all ranks but one or two, in a large world

        def share(rank: int) -> Layout:
            start = max(rank * size - offset, 0)
            stop = min((rank + 1) * size - offset, numel)
            return flat_run(shape, start, stop) if start < stop else nothing

        return share

    def gaps(self) -> list[tuple[int, int]]:
        """Return the padding as ranges of elements ``(start, stop)``."""
        found, end = [], 0
        for offset, numel in sorted(zip(self.offsets, self.numels, strict=True)):
            if offset > end:
                found.append((end, offset))
            end = max(end, offset + numel)
        return [*found, (end, self.numel)] if end < self.numel else found


def _deal_round_robin(count: int, partitions: int) -> list[int]:
    """List every ``partitions``-th number from 0, then from 1, and so on."""
    return [index for first in range(min(partitions, count)) for index in range(first, count, partitions)]


def flat_run(shape: Sequence[int], start: int, stop: int) -> Layout:
    """Return the elements ``start`` to ``stop`` of the row-major order, without padding."""
    strides = row_major_strides(shape)
    placed = []
    for box in row_major_boxes(shape, start, min(stop, prod(shape))):
        first = sum(o * s for o, s in zip(box.origin, strides, strict=True))
        placed.append(LocalBox(box, first - start, strides))
    return Layout(tuple(shape), stop - start, stop - start, tuple(placed))


def narrow_layout(layout: Layout, start: int, stop: int) -> Layout:
    """Return the layout of the elements ``start`` to ``stop`` of a local storage."""
    boxes = []
    for placed in itertools.chain.from_iterable(map(_unbroken, layout.boxes)):
        count = prod(placed.box.extent)
        low, high = max(start - placed.to, 0), min(stop - placed.to, count)
        for inner in row_major_boxes(placed.box.extent, low, max(low, high)):
            origin = tuple(a + b for a, b in zip(placed.box.origin, inner.origin, strict=True))
            offset = sum(o * s for o, s in zip(inner.origin, placed.strides, strict=True))
            boxes.append(LocalBox(Box(origin, inner.extent), placed.to + offset - start, placed.strides))
    owned = min(max(layout.owned - start, 0), stop - start)
    return Layout(layout.shape, stop - start, owned, tuple(boxes))


def _unbroken(placed: LocalBox) -> Iterator[LocalBox]:
    extent, step, split = placed.box.extent, 1, len(placed.box.extent)
    while split and (extent[split - 1] == 1 or placed.strides[split - 1] == step):
        split -= 1
        step *= extent[split]
    for index in itertools.product(*(range(n) for n in extent[:split])):
        origin = tuple(
            o + i for o, i in zip(placed.box.origin, (*index, *[0] * len(extent[split:])), strict=True)
        )
        offset = sum(i * stride for i, stride in zip(index, placed.strides, strict=False))
        yield LocalBox(Box(origin, (1,) * split + tuple(extent[split:])), placed.to + offset, placed.strides)
