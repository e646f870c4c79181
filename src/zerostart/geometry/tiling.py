"""Whether strided fragments cover a range of addresses exactly once, decided on integers.

A single fragment ``start + sum(i_k * stride_k)`` covers ``[0, n)`` exactly once if and only if its strides,
from the smallest, are 1 and then each the product of the sizes below it: a positional number system (N. G. de
Bruijn, *On number systems*, 1956). Several fragments are reduced to that: by the period that they have in
common, and by the parts of the range that none of them crosses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np

#: First address, and ``(size, stride)`` of the loops.
Strided = tuple[int, tuple[tuple[int, int], ...]]

#: Most addresses that are counted one by one where the reductions come to no answer.
COUNTED = 1 << 22


def tiles(fragments: Iterable[Strided], count: int) -> bool:
    """Whether the fragments together have every address of ``[0, count)`` once, and no other.

    False as well for more than ``COUNTED`` addresses in an order for which no reduction is known.
    """
    found = [(start, _merged(loops)) for start, loops in fragments]
    if any(stride < 1 for _, loops in found for _, stride in loops):
        return False
    # With as many elements as addresses, "each at least once" and "each at most once" are the same question.
    if sum(prod(size for size, _ in loops) for _, loops in found) != count:
        return False
    return _tile(found, 0, count)


def _tile(fragments: Sequence[Strided], low: int, high: int) -> bool:
    """The same for ``[low, high)``, where the number of elements is right already."""
    pending = [(list(fragments), low, high)]
    while pending:
        here, low, high = pending.pop()
        if len(here) == 1:
            ((start, loops),) = here
            if start != low or not _dense(loops):
                return False
            continue
        # 1. Parts of the range that no fragment crosses are decided one by one.
        groups = _apart(here, low, high)
        if groups is None:
            return False
        if len(groups) > 1:
            pending += groups
            continue
        # 2. All repeat with one period through the whole range: one period decides.
        period = _period(here, high - low)
        if period is not None:
            pending.append(([(start, loops[1:]) for start, loops in here], low, low + period))
        # 3. Neither: every address is counted.
        elif not _counted(here, low, high):
            return False
    return True


def _merged(loops: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Loops from the largest stride to the smallest; neighbours that are one loop are joined."""
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


def _apart(fragments: Sequence[Strided], low: int, high: int) -> list[tuple[list[Strided], int, int]] | None:
    """The fragments by parts of the range that none crosses; None where a part has too few or too many."""
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
    """The stride of the outermost loop, where all have the same and it goes through the whole range."""
    outer = {loops[:1] for _, loops in fragments}
    if len(outer) != 1:
        return None
    (first,) = outer
    if not first or first[0][0] * first[0][1] != length:
        return None
    return first[0][1]


def _counted(fragments: Sequence[Strided], low: int, high: int) -> bool:
    if high - low > COUNTED:
        return False
    seen = np.zeros(high - low, dtype=bool)
    for start, loops in fragments:
        places = np.array([start - low])
        for size, stride in loops:
            places = (places[:, None] + np.arange(size) * stride).reshape(-1)
        if places.min() < 0 or places.max() >= len(seen):
            return False
        seen[places] = True
    # As many elements as addresses: all seen means each once.
    return bool(seen.all())
