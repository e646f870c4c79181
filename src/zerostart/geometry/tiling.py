"""Check on integers that strided fragments cover a range of addresses exactly once.

A single fragment ``start + sum(i_k * stride_k)`` covers ``[0, n)`` exactly once if and only if its strides,
from the smallest, are 1 and then each the product of the sizes below it: a positional number system (N. G. de
Bruijn, *On number systems*, 1956). Several fragments are reduced to that by their common period, and by the
parts of the range that no fragment crosses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from zerostart.geometry.copies import Box

#: First address, and the ``(size, stride)`` of each loop over further addresses.
Strided = tuple[int, tuple[tuple[int, int], ...]]

#: Maximum number of addresses to check one by one, if no reduction decides.
MAX_COUNTED_ADDRESSES = 1 << 22


def tiles(fragments: Iterable[Strided], count: int) -> bool:
    """Return True if fragments cover exactly the addresses ``[0, count)``, each once.

    Return False too for more than ``MAX_COUNTED_ADDRESSES`` addresses in an order that no reduction handles.
    """
    merged = [(start, _merge(loops)) for start, loops in fragments]
    if any(stride < 1 for _, loops in merged for _, stride in loops):
        return False
    # If there are as many elements as addresses, it is enough that each address is covered.
    if sum(prod(size for size, _ in loops) for _, loops in merged) != count:
        return False
    return _tile(merged, 0, count)


def _tile(fragments: Sequence[Strided], low: int, high: int) -> bool:
    """Check fragments of ``[low, high)`` that have as many elements as addresses."""
    pending = [(list(fragments), low, high)]
    while pending:
        here, low, high = pending.pop()
        if len(here) == 1:
            ((start, loops),) = here
            if start != low or not _dense(loops):
                return False
            continue
        # 1. Check separately the parts of the range that no fragment crosses.
        groups = _separate(here, low, high)
        if groups is None:
            return False
        if len(groups) > 1:
            pending += groups
            continue
        # 2. If all fragments repeat with one period through the range, check one period.
        period = _period(here, high - low)
        if period is not None:
            pending.append(([(start, loops[1:]) for start, loops in here], low, low + period))
        # 3. Otherwise check every address.
        elif not _check_addresses(here, low, high):
            return False
    return True


def _merge(loops: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    out: list[tuple[int, int]] = []
    for size, stride in sorted(loops, key=lambda loop: -loop[1]):
        if size == 1:
            continue
        if out and out[-1][1] == size * stride:
            out[-1] = (out[-1][0] * size, stride)
        else:
            out.append((size, stride))
    return tuple(out)


def _dense(loops: Sequence[tuple[int, int]]) -> bool:
    return not loops or (len(loops) == 1 and loops[0][1] == 1)


def _span(loops: Iterable[tuple[int, int]]) -> int:
    return 1 + sum((size - 1) * stride for size, stride in loops)


def _separate(
    fragments: Sequence[Strided], low: int, high: int
) -> list[tuple[list[Strided], int, int]] | None:
    """Group the fragments by parts of the range that no fragment crosses.

    None if a part has too few or too many elements.
    """
    groups: list[tuple[list[Strided], int, int]] = []
    end = low
    for start, loops in sorted(fragments):
        if start >= end:
            if start > end:
                return None
            groups.append(([], start, start))
        if not groups:
            return None
        stop = start + _span(loops)
        end = max(end, stop)
        groups[-1][0].append((start, loops))
        groups[-1] = (groups[-1][0], groups[-1][1], end)
    full = all(sum(prod(n for n, _ in loops) for _, loops in g) == b - a for g, a, b in groups)
    return groups if end == high and full else None


def _period(fragments: Sequence[Strided], length: int) -> int | None:
    outer = {loops[:1] for _, loops in fragments}
    if len(outer) != 1:
        return None
    (first,) = outer
    if not first or first[0][0] * first[0][1] != length:
        return None
    return first[0][1]


def _check_addresses(fragments: Sequence[Strided], low: int, high: int) -> bool:
    if high - low > MAX_COUNTED_ADDRESSES:
        return False
    import numpy as np  # only here, since reading a catalog does not need it

    is_covered = np.zeros(high - low, dtype=bool)
    for start, loops in fragments:
        places = np.array([start - low])
        for size, stride in loops:
            places = (places[:, None] + np.arange(size) * stride).reshape(-1)
        if places.min() < 0 or places.max() >= len(is_covered):
            return False
        is_covered[places] = True
    # There are as many elements as addresses: if all are covered, each is covered once.
    return bool(is_covered.all())


# A strided view of a dense tensor as steps that move whole dimensions: split, slice, reorder, join.

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class View:
    """Steps from a base tensor to its view: split, slice, join and reorder dimensions."""

    #: Dimensions of the base, sorted from the largest stride to the smallest.
    order: Ints
    #: Sizes of those dimensions after the split.
    split: Ints
    #: Start of the slice of each split dimension.
    starts: Ints
    counts: Ints
    #: Shape after the join: the view's dimensions, sorted from the largest stride to the smallest.
    joined: Ints
    #: Joined dimensions in the view's order, without those of size 1.
    permutation: Ints
    #: The view's shape.
    shape: Ints
    #: Box of the base that the view covers, in the base's order; None if it is not a box.
    box: Box | None


@lru_cache(maxsize=1 << 14)
def view_within(
    shape: Ints, strides: Ints, offset: int, view_shape: Ints, view_strides: Ints, view_offset: int
) -> View | None:
    """Return the steps to a view of a tensor of ``shape`` and ``strides``; offsets in elements.

    Return None if elements of the view overlap or are outside the tensor, or if its loops cross rows.
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
    # 2. From the smallest stride on, each loop covers part of one dimension, or several and part of the next.
    counts = [1] * len(split)
    remaining, waiting = 1, list(loops)
    for k in range(len(split) - 1, -1, -1):
        if waiting and waiting[-1][0] == bounds[k]:
            if remaining > 1:
                return None
            remaining = waiting.pop()[1]
        if starts[k] + remaining <= split[k]:
            counts[k], remaining = remaining, 1
        elif starts[k] == 0 and remaining % split[k] == 0:
            counts[k], remaining = split[k], remaining // split[k]
        else:
            return None
    if remaining > 1 or waiting:
        return None
    joined = [n for _, n, _ in loops]
    permutation = [next(i for i, (_, _, at) in enumerate(loops) if at == d) for d in moving]
    box = _box(order, sizes, dense, bounds, split, starts, counts)
    return View(
        *(tuple(order), tuple(split), tuple(starts), tuple(counts)),
        *(tuple(joined), tuple(permutation), tuple(view_shape), box),
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
    origin, extent = [0] * len(order), [1] * len(order)
    for d, size, step in zip(order, sizes, dense, strict=True):
        inside = [k for k, low in enumerate(bounds) if step <= low < step * size]
        moving = [k for k in inside if counts[k] > 1]
        # Dimensions inside the outermost moving one must be whole, otherwise there are gaps.
        if moving and any(k > moving[0] and counts[k] != split[k] for k in inside):
            return None
        origin[d] = sum(starts[k] * (bounds[k] // step) for k in inside)
        extent[d] = prod(counts[k] for k in inside)
    return Box(tuple(origin), tuple(extent))


def subtract_box(box: Box, cover: Box) -> list[Box]:
    """Return disjoint boxes that cover ``box`` without ``cover``."""
    boxes: list[Box] = []
    origin, extent = list(box.origin), list(box.extent)
    for d in range(len(origin)):
        low, high = origin[d], origin[d] + extent[d]
        start, stop = max(low, cover.origin[d]), min(high, cover.origin[d] + cover.extent[d])
        if start >= stop:
            return [box]
        for at, end in ((low, start), (stop, high)):
            if at < end:
                first, size = (*origin[:d], at, *origin[d + 1 :]), (*extent[:d], end - at, *extent[d + 1 :])
                boxes.append(Box(first, size))
        origin[d], extent[d] = start, stop - start
    return boxes
