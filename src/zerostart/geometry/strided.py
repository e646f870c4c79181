"""A strided view of a dense tensor as steps that move whole dimensions: split, slice, reorder, join.

A loader writes into ``parameter.narrow(0, 8, 4).t()``, of which only sizes, strides and the offset are known
afterwards. Said by steps, a write into it changes few pieces of the parameter, however many runs of memory
the view has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from zerostart.geometry.boxes import Box

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class View:
    """How a view is had from its base, in this order, and how it lies in it."""

    #: The dimensions of the base from the largest stride to the smallest.
    order: Ints
    #: Those dimensions, split.
    split: Ints
    #: Of each split dimension the part that is taken.
    starts: Ints
    counts: Ints
    #: The shape that the taken parts are joined to: the view's dimensions from the largest stride on.
    joined: Ints
    #: The joined dimensions in the view's order; those of size 1 are left out.
    turned: Ints
    #: The view's shape.
    shape: Ints
    #: The view as a box of the base, in the base's own order; None where it is not one.
    box: Box | None


@lru_cache(maxsize=1 << 14)
def view_within(
    shape: Ints, strides: Ints, offset: int, view_shape: Ints, view_strides: Ints, view_offset: int
) -> View | None:
    """The view of a tensor of ``shape`` and ``strides``, if it can be had by steps; offsets in elements.

    None for a view whose elements overlap, that leaves the tensor, or whose runs cross its rows.
    """
    order = sorted(range(len(shape)), key=lambda d: (-strides[d], -shape[d]))
    sizes = [shape[d] for d in order]
    dense = [prod(sizes[i + 1 :]) for i in range(len(sizes))]
    if any(n > 1 and strides[d] != s for d, n, s in zip(order, sizes, dense, strict=True)):
        return None
    numel = prod(sizes)
    moving = [d for d, n in enumerate(view_shape) if n > 1]
    loops = sorted(((view_strides[d], view_shape[d], d) for d in moving), reverse=True)
    steps = [stride for stride, _, _ in loops]
    first = view_offset - offset
    if not numel or not prod(view_shape) or 0 in steps or len(set(steps)) < len(steps) or first < 0:
        return None
    # 1. Split wherever a dimension of the base, or a loop of the view, steps.
    bounds = sorted({1, *(s for s in dense if s < numel), *steps}, reverse=True)
    above = [numel, *bounds]
    if any(high % low for high, low in zip(above, bounds, strict=False)):
        return None
    split = [high // low for high, low in zip(above, bounds, strict=False)]
    if first >= numel or 0 in split:
        return None
    starts = [first // low % size for low, size in zip(bounds, split, strict=True)]
    # 2. From the innermost outwards: each loop takes a part of one, or all of several and a part of the next.
    counts = [1] * len(split)
    left, waiting = 1, list(loops)
    for k in range(len(split) - 1, -1, -1):
        if waiting and waiting[-1][0] == bounds[k]:
            if left > 1:
                return None
            left = waiting.pop()[1]
        if starts[k] + left <= split[k]:
            counts[k], left = left, 1
        elif starts[k] == 0 and left % split[k] == 0:
            counts[k], left = split[k], left // split[k]
        else:
            return None
    if left > 1 or waiting:
        return None
    joined = [n for _, n, _ in loops]
    turned = [next(i for i, (_, _, at) in enumerate(loops) if at == d) for d in moving]
    box = _box(order, sizes, dense, bounds, split, starts, counts)
    return View(
        *(tuple(order), tuple(split), tuple(starts), tuple(counts)),
        *(tuple(joined), tuple(turned), tuple(view_shape), box),
    )


def _box(
    order: Sequence[int],
    sizes: Sequence[int],
    dense: Sequence[int],
    bounds: Sequence[int],
    split: Sequence[int],
    starts: Sequence[int],
    counts: Sequence[int],
) -> Box | None:
    """The taken parts as one box of the base, if in each of its dimensions they follow each other."""
    origin, extent = [0] * len(order), [1] * len(order)
    for d, size, step in zip(order, sizes, dense, strict=True):
        inside = [k for k, low in enumerate(bounds) if step <= low < step * size]
        taken = [k for k in inside if counts[k] > 1]
        # Inside of the outermost that moves all has to be taken whole, or there are gaps.
        if taken and any(k > taken[0] and counts[k] != split[k] for k in inside):
            return None
        origin[d] = sum(starts[k] * (bounds[k] // step) for k in inside)
        extent[d] = prod(counts[k] for k in inside)
    return Box(tuple(origin), tuple(extent))


def without(box: Box, other: Box) -> list[Box]:
    """Disjoint boxes that cover what ``box`` has and ``other`` has not."""
    found: list[Box] = []
    origin, extent = list(box.origin), list(box.extent)
    for d in range(len(origin)):
        low, high = origin[d], origin[d] + extent[d]
        start, stop = max(low, other.origin[d]), min(high, other.origin[d] + other.extent[d])
        if start >= stop:
            return [box]
        for at, end in ((low, start), (stop, high)):
            if at < end:
                first, size = (*origin[:d], at, *origin[d + 1 :]), (*extent[:d], end - at, *extent[d + 1 :])
                found.append(Box(first, size))
        origin[d], extent[d] = start, stop - start
    return found
