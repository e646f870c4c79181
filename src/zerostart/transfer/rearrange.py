"""Reordering the parts of one buffer in place, with a bounded amount of memory beside it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: ``(from, to, elements)`` of a part of the buffer.
Segment = tuple[int, int, int]
#: Bytes of scratch memory; two of this size are used.
SCRATCH = 8 << 20


def in_place(segments: Sequence[Segment]) -> bool:
    """Whether every part is where it is to be."""
    return all(start == to for start, to, _ in segments)


def rearrange(flat: torch.Tensor, segments: Sequence[Segment], scratch: int = SCRATCH) -> None:
    """Move each segment of the 1-D contiguous ``flat`` to its new place; both sets must be disjoint.

    The parts are pushed together, brought into their new order, and spread out. What lies outside is lost.
    """
    segments = sorted(s for s in segments if s[2])
    mover = _Mover(flat, max(1, scratch // flat.element_size()))
    # The parts by their final place: what they are without gaps before that.
    ordered, end = [], 0
    for start, to, numel in sorted(segments, key=lambda s: s[1]):
        ordered.append((start, end, to, numel))
        end += numel
    # By old start, which no two segments share.
    wanted = {start: place for start, place, _, _ in ordered}
    # 1. Push together, from the front: what lies before a part is moved already, so that nothing is
    #    overwritten that is still wanted. Each part goes with the place that it has in the new order.
    end, packed = 0, []
    for start, _, numel in segments:
        mover.move(start, end, numel)
        packed.append((wanted[start], numel))
        end += numel
    # 2. Bring the parts, which have no gaps now, into their new order.
    _permute(mover, packed)
    # 3. Spread out, from the back: each goes to a place that lies behind its own, or at it, and is free.
    for _, place, to, numel in reversed(ordered):
        mover.move(place, to, numel)


def _permute(mover: _Mover, parts: Sequence[tuple[int, int]]) -> None:
    """Bring adjacent parts ``(target, elements)`` into the order of their targets.

    At each step the part that belongs at ``at`` changes places with the gap of other parts before it: through
    scratch memory where the gap fits there, else by exchanging equal lengths, which cuts a part in two.
    """
    # Before ``at`` all is in order; ``queue`` has the parts from there on, as they lie.
    queue, at = _joined(parts), 0
    while queue:
        # There is one: `at` is always where a part begins, also of those that were cut in two.
        index = next(i for i, (target, _) in enumerate(queue) if target == at)
        gap = sum(numel for _, numel in queue[:index])
        before, numel, after = queue[:index], queue[index][1], queue[index + 1 :]
        if not gap:
            at += numel
            queue = after
        elif numel <= gap:
            # It changes places with the first of the gap, which come to lie where it was, after the rest.
            mover.swap(at, at + gap, numel)
            # ``head`` was moved as it lay: its parts keep their targets, and are now behind the rest of the
            # gap.
            head, tail = _cut(before, numel)
            queue = _joined(tail + head + after)
            at += numel
        elif gap <= mover.room:
            mover.rotate(at, gap, numel)
            queue = _joined(before + after)
            at += numel
        else:
            # Longer than the gap: its first elements take the gap's place, and it is still the next part.
            mover.swap(at, at + gap, gap)
            at += gap
            queue[index] = (at, numel - gap)


def _cut(parts: Sequence[tuple[int, int]], numel: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    head, tail = [], []
    for target, length in parts:
        taken = min(length, numel)
        numel -= taken
        if taken:
            head.append((target, taken))
        if taken < length:
            tail.append((target + taken, length - taken))
    return head, tail


def _joined(parts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours that stay neighbours are one part."""
    found: list[tuple[int, int]] = []
    for target, numel in parts:
        if found and sum(found[-1]) == target:
            found[-1] = (found[-1][0], found[-1][1] + numel)
        else:
            found.append((target, numel))
    return found


class _Mover:
    def __init__(self, flat: torch.Tensor, room: int) -> None:
        self.room = room
        self._flat = flat
        self._scratch: torch.Tensor | None = None
        self._kept: torch.Tensor | None = None

    def move(self, start: int, to: int, numel: int) -> None:
        """Copy ``numel`` elements to where they may overlap with themselves."""
        if start == to:
            return
        firsts = range(0, numel, self.room)
        # As memmove does: towards the front from the front, towards the back from the back.
        for first in firsts if to < start else reversed(firsts):
            count = min(self.room, numel - first)
            source = self._flat[start + first : start + first + count]
            # A single chunk overlaps with where it goes, and `copy_` may read what it has written.
            if abs(to - start) < count:
                source = self._through(source)
            self._flat[to + first : to + first + count].copy_(source)

    def swap(self, one: int, other: int, numel: int) -> None:
        """Exchange two runs that do not overlap."""
        for first in range(0, numel, self.room):
            count = min(self.room, numel - first)
            a = self._flat[one + first : one + first + count]
            b = self._flat[other + first : other + first + count]
            saved = self._through(a)
            a.copy_(b)
            b.copy_(saved)

    def rotate(self, at: int, gap: int, numel: int) -> None:
        if self._kept is None:
            self._kept = self._flat.new_empty(self.room)
        # ``move`` uses the other scratch buffer, so what is kept here stays.
        kept = self._kept[:gap].copy_(self._flat[at : at + gap])
        self.move(at + gap, at, numel)
        self._flat[at + numel : at + numel + gap].copy_(kept)

    def _through(self, source: torch.Tensor) -> torch.Tensor:
        if self._scratch is None:
            self._scratch = self._flat.new_empty(self.room)
        return self._scratch[: source.numel()].copy_(source)
