"""One rank's local tensor of a parameter that a mesh axis cuts, before the engine shards it further.

A section is a tensor of its own, with the boxes of the parameter that make it up. Sections nest (experts,
then columns), and a layout of the local tensor becomes a layout of the parameter: ``section.holds(layout)``.

Engines shard the local tensor and know of no other; checkpoints have the parameter. So an engine's layout is
stated for the local tensor, and carried back through the section, before it meets a recipe: there is one kind
of layout for all that reads and writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from zerostart.geometry import Box
from zerostart.geometry.layout.layout import Layout, LocalBox


@dataclass(frozen=True, slots=True)
class Section:
    """One rank's local tensor of a parameter.

    It has several boxes where a fused parameter (gate and up, or query, key and value) is cut part by part:
    each rank has its share of every part, and they lie together in its tensor.
    """

    #: The parameter's shape.
    whole: tuple[int, ...]
    #: The local tensor's.
    shape: tuple[int, ...]
    #: Boxes of the parameter, each with its origin in the local tensor; none where the rank has nothing of
    #: it.
    boxes: tuple[tuple[Box, tuple[int, ...]], ...]

    def holds(self, layout: Layout) -> Layout:
        """``layout`` of the local tensor, as a layout of the parameter.

        Raises ValueError for one of a tensor of another shape.
        """
        if layout.shape != self.shape:
            raise ValueError(f"a layout of shape {layout.shape} does not fit a section of shape {self.shape}")
        placed = []
        for inner in layout.boxes:
            for origin, start, extent in self._meeting(inner.box):
                # The storage stays where it is: the part begins as far in it as it does in the inner box.
                moved = sum(
                    (s - o) * t for s, o, t in zip(start, inner.box.origin, inner.strides, strict=True)
                )
                placed.append(LocalBox(Box(origin, extent), inner.to + moved, inner.strides))
        return Layout(self.whole, layout.numel, layout.owned, tuple(placed))

    def section(self, inner: Section) -> Section:
        """A section of the local tensor, as a section of the parameter.

        Raises ValueError for one of a tensor of another shape.
        """
        if inner.whole != self.shape:
            raise ValueError(f"a section of shape {inner.whole} does not fit a section of shape {self.shape}")
        boxes = []
        for box, place in inner.boxes:
            for origin, start, extent in self._meeting(box):
                moved = tuple(p + s - o for p, s, o in zip(place, start, box.origin, strict=True))
                boxes.append((Box(origin, extent), moved))
        return Section(self.whole, inner.shape, tuple(boxes))

    def _meeting(self, local: Box) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
        """The parts of a box of the local tensor: origins in the parameter and the local tensor, extent."""
        for box, place in self.boxes:
            low = tuple(max(a, b) for a, b in zip(local.origin, place, strict=True))
            high = tuple(
                min(a + n, b + m)
                for a, n, b, m in zip(local.origin, local.extent, place, box.extent, strict=True)
            )
            extent = tuple(h - s for s, h in zip(low, high, strict=True))
            if all(n > 0 for n in extent):
                yield tuple(o + s - p for o, s, p in zip(box.origin, low, place, strict=True)), low, extent


def entire(shape: Sequence[int]) -> Section:
    """The whole parameter; one without dimensions too, which ``ranged`` has no dimension to cut for."""
    return ranged(shape, 0, [(0, shape[0])]) if shape else Section((), (), ((Box((), ()), ()),))


def chunk(shape: Sequence[int], dim: int, rank: int, size: int) -> Section:
    """``torch.chunk`` along ``dim``, as DTensor's ``Shard(dim)`` has it: the last ranks short or empty."""
    return packed(shape, dim, (shape[dim],), rank, size)


def packed(shape: Sequence[int], dim: int, parts: Sequence[int], rank: int, size: int) -> Section:
    """``dim`` holds fused parts of sizes ``parts``; each is chunked by itself, and a rank's are fused again.

    Equal parts that divide evenly are DTensor's ``_StridedShard(dim, split_factor=len(parts))``. Raises
    ValueError where the parts do not add up to the dimension.
    """
    if sum(parts) != shape[dim]:
        raise ValueError(
            f"parts of the sizes {tuple(parts)} do not add up to the {shape[dim]} elements of dimension {dim}"
        )
    ranges = []
    for first, length in zip(accumulate(parts, initial=0), parts, strict=False):
        # Chunks as ``torch.chunk`` makes them: all of the length of the first, so that the last may be empty.
        step = -(-length // size)
        low, high = min(rank * step, length), min((rank + 1) * step, length)
        ranges.append((first + low, first + high))
    return ranged(shape, dim, ranges)


def ranged(shape: Sequence[int], dim: int, ranges: Sequence[tuple[int, int]]) -> Section:
    """The local tensor that has these index ranges of ``dim``, one after the other, and all of the rest."""
    dim %= len(shape)
    head, tail = tuple(shape[:dim]), tuple(shape[dim + 1 :])
    boxes, at = [], 0
    for low, high in ranges:
        place = (0,) * dim + (at,) + (0,) * len(tail)
        box = Box((0,) * dim + (low,) + (0,) * len(tail), (*head, high - low, *tail))
        # A rank that has nothing of the parameter has no boxes, by which it is known.
        if prod(box.extent):
            boxes.append((box, place))
        at += high - low
    return Section(tuple(shape), (*head, at, *tail), tuple(boxes))
