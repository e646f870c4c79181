"""Flat buffers: parameters one after the other in one buffer, as ZeRO stages 1 and 2 keep a group of them.

Source: DeepSpeed's ``runtime/zero/stage_1_and_2.py`` (``_round_robin_reorder``, the loop over groups in the
constructor) and ``runtime/bf16_optimizer.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd, prod

from zerostart.geometry import Box, row_major_boxes, row_major_strides
from zerostart.geometry.layout.layout import Layout, LocalBox

#: A partition begins at a multiple of this many elements (DeepSpeed's ``nccl_start_alignment_factor``).
START_ALIGNMENT = 2
#: Bytes that ``parameter_alignment`` aligns each parameter to.
PARAMETER_BYTES = 16


@dataclass(frozen=True, slots=True)
class FlatRules:
    """How an optimizer over ``partitions`` ranks flattens a group."""

    partitions: int
    round_robin: bool = False
    aligned: bool = False

    def group(self, numels: Sequence[int], itemsize: int) -> FlatGroup:
        """The flat group of parameters with ``numels`` elements, in the optimizer's order."""
        order = _dealt(len(numels), self.partitions) if self.round_robin else range(len(numels))
        # In elements: so many that a multiple of them is a multiple of PARAMETER_BYTES.
        step = PARAMETER_BYTES // gcd(PARAMETER_BYTES, itemsize) if self.aligned else 1
        offsets, end = [0] * len(numels), 0
        for position in order:
            # The last one is followed by the padding of the group alone.
            end += -end % step
            offsets[position] = end
            end += numels[position]
        whole = START_ALIGNMENT * self.partitions
        return FlatGroup(tuple(offsets), tuple(numels), end + -end % whole)


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """Parameters in one flat buffer of ``numel`` elements; what none of them covers is zero."""

    offsets: tuple[int, ...]
    numels: tuple[int, ...]
    numel: int

    def share(self, place: int, shape: Sequence[int], partitions: int) -> Callable[[int], Layout]:
        """Of the parameter number ``place``, of ``shape``: what lies in each rank's part of the buffer."""
        one = FlatGroup((self.offsets[place],), (self.numels[place],), self.numel)
        size = self.numel // partitions
        nothing = flat_run(shape, 0, 0)  # what all ranks but one or two have of it, in a large world

        def share(rank: int) -> Layout:
            ((start, stop),) = shares(one, rank * size, (rank + 1) * size)
            return flat_run(shape, start, stop) if start < stop else nothing

        return share

    def gaps(self) -> list[tuple[int, int]]:
        """The padding, as ranges of elements ``(start, stop)``."""
        found, end = [], 0
        for offset, numel in sorted(zip(self.offsets, self.numels, strict=True)):
            if offset > end:
                found.append((end, offset))
            end = max(end, offset + numel)
        return [*found, (end, self.numel)] if end < self.numel else found


def _dealt(count: int, partitions: int) -> list[int]:
    """Every ``partitions``-th, from the first; then from the second, and so on."""
    return [index for first in range(min(partitions, count)) for index in range(first, count, partitions)]


def shares(group: FlatGroup, start: int, stop: int) -> list[tuple[int, int]]:
    """Of each parameter, the run of its row-major order that lies in the elements ``start`` to ``stop``.

    A parameter with nothing there has an empty run.
    """
    found = []
    for offset, numel in zip(group.offsets, group.numels, strict=True):
        # Both ends clamped to the parameter, in its own element numbers: outside, the run is empty.
        low = min(max(start - offset, 0), numel)
        found.append((low, max(low, min(stop - offset, numel))))
    return found


def flat_run(shape: Sequence[int], start: int, stop: int) -> Layout:
    """The elements ``start`` to ``stop`` of the row-major order, one after the other, without padding."""
    strides = row_major_strides(shape)
    placed = []
    for box in row_major_boxes(shape, start, min(stop, prod(shape))):
        first = sum(o * s for o, s in zip(box.origin, strides, strict=True))
        placed.append(LocalBox(box, first - start, strides))
    return Layout(tuple(shape), stop - start, stop - start, tuple(placed))


def narrowed(layout: Layout, start: int, stop: int) -> Layout:
    """The elements ``start`` to ``stop`` of the local storage of ``layout``, as a layout of them alone."""
    kept = []
    for placed in itertools.chain.from_iterable(map(_unbroken, layout.boxes)):
        count = prod(placed.box.extent)
        low, high = max(start - placed.to, 0), min(stop - placed.to, count)
        for inner in row_major_boxes(placed.box.extent, low, max(low, high)):
            origin = tuple(a + b for a, b in zip(placed.box.origin, inner.origin, strict=True))
            moved = sum(o * s for o, s in zip(inner.origin, placed.strides, strict=True))
            kept.append(LocalBox(Box(origin, inner.extent), placed.to + moved - start, placed.strides))
    owned = min(max(layout.owned - start, 0), stop - start)
    return Layout(layout.shape, stop - start, owned, tuple(kept))


def _unbroken(placed: LocalBox) -> Iterator[LocalBox]:
    """Boxes that make up ``placed``, each of which is one unbroken run of the storage."""
    extent, step, split = placed.box.extent, 1, len(placed.box.extent)
    while split and (extent[split - 1] == 1 or placed.strides[split - 1] == step):
        split -= 1
        step *= extent[split]
    for index in itertools.product(*(range(n) for n in extent[:split])):
        origin = tuple(
            o + i for o, i in zip(placed.box.origin, (*index, *[0] * len(extent[split:])), strict=True)
        )
        moved = sum(i * stride for i, stride in zip(index, placed.strides, strict=False))
        yield LocalBox(Box(origin, (1,) * split + tuple(extent[split:])), placed.to + moved, placed.strides)
