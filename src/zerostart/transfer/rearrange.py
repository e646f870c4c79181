"""Reorder segments of one buffer in place, with bounded scratch memory."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

import torch

from zerostart.upstream.torch.tensors import storage_users

logger = logging.getLogger("zerostart")

#: ``(from, to, elements)`` of a segment.
Segment = tuple[int, int, int]
#: Size of a scratch buffer, in bytes; there are two.
SCRATCH = 8 << 20


def is_in_place(segments: Sequence[Segment]) -> bool:
    """Return True if every segment is in its final place."""
    return all(start == to for start, to, _ in segments)


def rearrange(flat: torch.Tensor, segments: Sequence[Segment], scratch: int = SCRATCH) -> None:
    """Move segments of the 1-D contiguous ``flat`` in place.

    Old places must be disjoint, and new ones too. Elements outside the segments are lost.
    """
    segments = sorted(s for s in segments if s[2])
    mover = _Mover(flat, max(1, scratch // flat.element_size()))
    # Segments in their final order, with their places before gaps are inserted.
    ordered, end = [], 0
    for start, to, numel in sorted(segments, key=lambda s: s[1]):
        ordered.append((start, end, to, numel))
        end += numel
    # Segments are identified by their old start.
    packed_place = {start: place for start, place, _, _ in ordered}
    # 1. Close the gaps, from the front, so that no segment overwrites a later one.
    end, packed = 0, []
    for start, _, numel in segments:
        mover.move(start, end, numel)
        packed.append((packed_place[start], numel))
        end += numel
    # 2. Bring the adjacent segments into their new order.
    _permute(mover, packed)
    # 3. Insert the gaps, from the back: each new place is free.
    for _, place, to, numel in reversed(ordered):
        mover.move(place, to, numel)


def _permute(mover: _Mover, parts: Sequence[tuple[int, int]]) -> None:
    """Order adjacent parts ``(target, elements)`` by target.

    At each step the part for ``at`` is swapped with the parts before it. These go through scratch memory if
    they fit, otherwise equal lengths are exchanged, which may cut a part in two.
    """
    # Everything before ``at`` is in order; ``queue`` has the parts from there on.
    queue, at = _merge_neighbours(parts), 0
    while queue:
        # A part always starts at ``at``, also after cuts.
        index = next(i for i, (target, _) in enumerate(queue) if target == at)
        gap = sum(numel for _, numel in queue[:index])
        before, numel, after = queue[:index], queue[index][1], queue[index + 1 :]
        if not gap:
            at += numel
            queue = after
        elif numel <= gap:
            # Swap it with the first parts of the gap, which then follow the rest of the gap.
            mover.swap(at, at + gap, numel)
            # The parts in ``head`` keep their targets.
            head, tail = _split_parts(before, numel)
            queue = _merge_neighbours(tail + head + after)
            at += numel
        elif gap <= mover.room:
            mover.rotate(at, gap, numel)
            queue = _merge_neighbours(before + after)
            at += numel
        else:
            # Longer than the gap: its first elements fill the gap, and it remains the next part.
            mover.swap(at, at + gap, gap)
            at += gap
            queue[index] = (at, numel - gap)


def _split_parts(
    parts: Sequence[tuple[int, int]], numel: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    head, tail = [], []
    for target, length in parts:
        count = min(length, numel)
        numel -= count
        if count:
            head.append((target, count))
        if count < length:
            tail.append((target + count, length - count))
    return head, tail


def _merge_neighbours(parts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for target, numel in parts:
        if merged and sum(merged[-1]) == target:
            merged[-1] = (merged[-1][0], merged[-1][1] + numel)
        else:
            merged.append((target, numel))
    return merged


class _Mover:
    def __init__(self, flat: torch.Tensor, room: int) -> None:
        self.room = room
        self._flat = flat
        self._scratch: torch.Tensor | None = None
        self._rotated: torch.Tensor | None = None

    def move(self, start: int, to: int, numel: int) -> None:
        """Copy ``numel`` elements; source and destination may overlap."""
        if start == to:
            return
        firsts = range(0, numel, self.room)
        # As memmove: towards the front from the front, towards the back from the back.
        for first in firsts if to < start else reversed(firsts):
            count = min(self.room, numel - first)
            source = self._flat[start + first : start + first + count]
            # `copy_` may read elements that it has written, so overlapping chunks go through scratch.
            if abs(to - start) < count:
                source = self._copy_to_scratch(source)
            self._flat[to + first : to + first + count].copy_(source)

    def swap(self, first_start: int, second_start: int, numel: int) -> None:
        """Exchange two runs that do not overlap."""
        for first in range(0, numel, self.room):
            count = min(self.room, numel - first)
            a = self._flat[first_start + first : first_start + first + count]
            b = self._flat[second_start + first : second_start + first + count]
            saved = self._copy_to_scratch(a)
            a.copy_(b)
            b.copy_(saved)

    def rotate(self, at: int, gap: int, numel: int) -> None:
        if self._rotated is None:
            self._rotated = self._flat.new_empty(self.room)
        # ``move`` uses the other scratch buffer.
        saved = self._rotated[:gap].copy_(self._flat[at : at + gap])
        self.move(at + gap, at, numel)
        self._flat[at + numel : at + numel + gap].copy_(saved)

    def _copy_to_scratch(self, source: torch.Tensor) -> torch.Tensor:
        if self._scratch is None:
            self._scratch = self._flat.new_empty(self.room)
        return self._scratch[: source.numel()].copy_(source)


def reorder(
    storage: torch.UntypedStorage, targets: Sequence[tuple[torch.Tensor, int]], end: int
) -> torch.Tensor | None:
    """Move contiguous tensors to byte offsets of their ``storage``; return the whole as bytes.

    Scratch memory is bounded. None, and nothing moved, if the storage ends before ``end``, if tensors
    overlap, or if a tensor that is not listed shares the storage.
    """
    segments = [(int(t.storage_offset()) * t.itemsize, to, t.nbytes) for t, to in targets if t.nbytes]
    overlapping = any(a[0] + a[2] > b[0] for a, b in itertools.pairwise(sorted(segments)))
    if end > storage.nbytes() or overlapping:
        return None
    base = torch.empty(0, dtype=torch.uint8, device=storage.device)
    base.set_(storage, 0, (storage.nbytes(),), (1,))
    if not is_in_place(segments):
        # Expected users: the listed tensors, ``base`` and ``storage``.
        if storage_users(storage) > len(targets) + 2:
            logger.warning(
                "tensors other than the model's parameters share their memory (a state dict, or views of "
                "them): the parameters are copied instead of being reordered in place; delete such "
                "tensors before deepspeed.initialize"
            )
            return None
        rearrange(base, segments)
    for tensor, place in targets:
        tensor.data = base[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return base
