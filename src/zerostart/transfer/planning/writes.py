"""Plan the writes of a save: reversed reads.

Each tensor is divided into windows of equal size, the same on every rank, from the start of a page of the
file. The elements that a rank has in one window are one write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from zerostart.checkpoint.storage.direct import PAGE
from zerostart.checkpoint.write.shards import SaveLayout
from zerostart.geometry import Copy, Loop, is_one_run
from zerostart.geometry.layout import Layout
from zerostart.recipe import Recipe, torch_dtype
from zerostart.transfer.planning.join import pull_back
from zerostart.transfer.planning.plan import Part

#: Minimum size of a part of a replicated share, in bytes.
GRAIN = 1 << 20


@dataclass(frozen=True, slots=True)
class Origin:
    """Local storage that a save writes."""

    dtype: torch.dtype
    #: True for host memory, which can be written without a staging buffer.
    direct: bool


@dataclass(frozen=True, slots=True)
class Write:
    """One rank's elements in one window of a tensor."""

    #: Name of the tensor in the files.
    name: str
    dtype: torch.dtype
    #: Number of its first element in the tensor.
    first: int
    #: Elements from the first to the last, gaps included.
    span: int
    #: Elements of all parts; equal to ``span`` if there are no gaps.
    count: int
    #: Disjoint parts: byte ``at`` of the window, number ``target`` of the storage, loops of (size, stride in
    #: the file, stride in the storage).
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """Bytes to write."""
        return self.count * self.dtype.itemsize

    @property
    def direct(self) -> bool:
        """True for one run of host memory in the file's dtype."""
        return len(self.parts) == 1 and self.parts[0].direct

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield groups of equal runs: ``(first element, elements, distance, runs)``."""
        if self.count == self.span:
            yield 0, self.span, self.span, 1
            return
        starts, lengths = self.runs()
        steps = np.diff(starts)
        changes = np.concatenate([[False], steps[1:] != steps[:-1]]) | (lengths[1:] != lengths[:-1])
        breaks = np.flatnonzero(changes) + 1
        for group, (length, *_) in zip(np.split(starts, breaks), np.split(lengths, breaks), strict=True):
            step = group[1] - group[0] if len(group) > 1 else length
            yield int(group[0]), int(length), int(step), len(group)

    def runs(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return starts and lengths of unbroken runs, relative to ``first``."""
        runs_of_parts = [_find_runs(part) for part in self.parts]
        starts = np.concatenate([s for s, _ in runs_of_parts])
        order = np.argsort(starts)
        starts = starts[order]
        lengths = np.concatenate([np.full(len(s), n) for s, n in runs_of_parts])[order]
        begins = np.flatnonzero(np.concatenate([[True], starts[1:] != starts[:-1] + lengths[:-1]]))
        return starts[begins], np.add.reduceat(lengths, begins)


@dataclass(frozen=True)
class WritePlan:
    """All writes of one rank."""

    writes: tuple[Write, ...]
    chunk_size: int

    @cached_property
    def nbytes(self) -> int:
        """Bytes to write."""
        return sum(write.nbytes for write in self.writes)


def plan_writes(
    layout: SaveLayout,
    outgoing: Iterable[tuple[Recipe, Layout, Origin]],
    chunk_size: int,
    page: int = PAGE,
) -> WritePlan:
    """Plan the writes of a rank's shares of targets.

    No write is longer than ``chunk_size`` bytes, nor crosses a multiple of it if ``page`` is as large.
    """
    origins: list[Origin] = []
    windows: dict[tuple[str, int], list[Part]] = {}
    kinds: dict[str, torch.dtype] = {}
    leads: dict[str, int] = {}
    for recipe, share, origin in outgoing:
        number = len(origins)
        origins.append(origin)
        for copy in pull_back(recipe, share):
            name = str(copy.source)
            if name not in kinds:
                kinds[name] = torch_dtype(layout.tensors[name].dtype, name)
                # Windows start with the page of the tensor's first byte, so all later ones are aligned to
                # pages.
                leads[name] = layout.tensors[name].offset % page // kinds[name].itemsize
            dtype = kinds[name]
            size = max(1, chunk_size // dtype.itemsize)
            direct = origin.direct and origin.dtype == dtype
            for window, part in _split_parts(copy, dtype, size, leads[name], number, direct):
                windows.setdefault((name, window), []).append(part)
    writes = [
        _make_write(
            name, kinds[name], window * max(1, chunk_size // kinds[name].itemsize) - leads[name], parts
        )
        for (name, window), parts in windows.items()
    ]
    # In the order of the files, so that each is written from start to end.
    places = layout.tensors
    writes.sort(key=lambda w: (places[w.name].file, places[w.name].offset, w.first))
    return WritePlan(tuple(writes), chunk_size)


def split_shares(shares: Iterable[tuple[Layout, tuple[int, int], int]]) -> Iterator[Layout | None]:
    """Yield the part of each share that this rank writes, or None.

    ``shares`` are (layout, (place, holders), bytes of an element), in one order on all ranks. Exactly one
    holder writes each element. A large share is divided equally among its holders.
    """
    turn = 0
    for layout, (place, holders), itemsize in shares:
        parts = max(1, min(holders, layout.owned * itemsize // GRAIN))
        # One holder writes a small share whole; ``turn`` distributes them.
        number = (place - turn) % holders
        yield layout if holders == 1 else layout.part(number, parts) if number < parts else None
        # The size of the whole tensor is equal on all ranks.
        turn += 1 + prod(layout.shape) * itemsize // GRAIN


def _split_parts(
    copy: Copy, dtype: torch.dtype, size: int, lead: int, number: int, direct: bool
) -> Iterator[tuple[int, Part]]:
    for start, to, loops in _split_windows(copy.start + lead, copy.to, copy.loops, size):
        window, at = divmod(start, size)
        yield window, Part(at * dtype.itemsize, dtype, number, to, loops, direct and is_one_run(loops))


def _split_windows(
    start: int, to: int, loops: tuple[Loop, ...], size: int
) -> Iterator[tuple[int, int, tuple[Loop, ...]]]:
    span = 1 + sum((n - 1) * stride for n, stride, _ in loops)
    if start % size + span <= size:
        yield start, to, loops
        return
    (count, far, local), rest = loops[0], loops[1:]
    below = span - (count - 1) * far
    first = 0
    while first < count:
        at, place = start + first * far, to + first * local
        # Room left in the window after one step; negative if a step crosses its end, and inner loops are cut.
        room = size - at % size - below
        if room < 0:
            yield from _split_windows(at, place, rest, size)
            first += 1
            continue
        steps = min(room // far + 1, count - first)
        yield at, place, ((steps, far, local), *rest) if steps > 1 else rest
        first += steps


def _make_write(name: str, dtype: torch.dtype, begin: int, parts: list[Part]) -> Write:
    width = dtype.itemsize
    # Cut to the rank's first and last element; other ranks write the rest.
    low = min(part.at for part in parts)
    high = max(part.at + part.nbytes for part in parts)
    shifted = tuple(part._replace(at=part.at - low) for part in parts)
    count = sum(prod(size for size, _, _ in part.loops) for part in parts)
    return Write(name, dtype, begin + low // width, (high - low) // width, count, shifted)


def _find_runs(part: Part) -> tuple[npt.NDArray[np.int64], int]:
    length, loops = 1, list(part.loops)
    # Inner loops with a stride of the length so far continue the run in the file.
    while loops and loops[-1][1] == length:
        length *= loops.pop()[0]
    starts = np.array([part.at // part.dtype.itemsize], dtype=np.int64)
    for size, stride, _ in loops:
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return starts, length
