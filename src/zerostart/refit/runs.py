"""Sets of bytes of an image: who sends what to whom is an intersection of two of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np
import numpy.typing as npt

from zerostart.checkpoint.write.shards import SaveLayout
from zerostart.errors import CheckpointError
from zerostart.transfer.planning.plan import Plan
from zerostart.transfer.planning.writes import WritePlan

Numbers = npt.NDArray[np.int64]


class Runs:
    """A set of bytes: disjoint spans from ``low`` up to ``high``, in ascending order."""

    def __init__(self, low: Numbers, high: Numbers) -> None:
        self.low, self.high = low, high

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int, int, int]] | Numbers) -> Runs:
        """Make the set of any rows ``start, width, stride, count``, which may overlap."""
        if not isinstance(rows, np.ndarray):
            rows = np.array(list(rows), np.int64)
        start, width, stride, count = rows.reshape(-1, 4).astype(np.int64, copy=False).T
        count = np.where(width > 0, count, 0)
        row, number = _numbered(count)
        low = start[row] + number * stride[row]
        order = np.argsort(low, kind="stable")
        low, high = low[order], np.maximum.accumulate((low + width[row])[order])
        first = np.flatnonzero(np.append(True, low[1:] > high[:-1])[: len(low)])
        return cls(low[first], np.maximum.reduceat(high, first) if len(first) else high)

    @classmethod
    def of_reads(cls, plan: Plan) -> Runs:
        """Make the set of bytes that ``plan`` reads of its one file."""
        return cls.of([(r.offset, r.nbytes // r.rows, r.stride, r.rows) for r in plan.all_reads()])

    @classmethod
    def of_writes(cls, plan: WritePlan, layout: SaveLayout) -> Runs:
        """Make the set of bytes that ``plan`` writes of the one file of ``layout``."""
        found = []
        for write in plan.writes:
            width = write.dtype.itemsize
            starts, lengths = write.runs()
            rows = np.ones((len(starts), 4), np.int64)
            rows[:, 0] = layout.tensors[write.name].offset + (write.first + starts) * width
            rows[:, 1] = lengths * width
            found.append(rows)
        return cls.of(np.concatenate(found) if found else [])

    @classmethod
    def from_bytes(cls, data: bytes) -> Runs:
        """Read what ``to_bytes`` gave; raise CheckpointError for anything else."""
        if len(data) % 32:
            raise CheckpointError(f"{len(data)} bytes are no rows of four numbers of 8 bytes")
        rows = np.frombuffer(data, "<i8").reshape(-1, 4)
        # Bounded, so that no sum of them exceeds 64 bits, nor their number the memory.
        if (rows < 0).any() or (rows > [1 << 48, 1 << 48, 1 << 48, 1 << 28]).any() or (rows[:, 3] == 0).any():
            raise CheckpointError("rows of bytes with numbers that no file has")
        return cls.of(rows)

    def to_bytes(self) -> bytes:
        """Return 32 bytes a row: four numbers of 8 bytes, little-endian."""
        return self.rows.astype("<i8").tobytes()

    @cached_property
    def rows(self) -> Numbers:
        """Rows ``start, width, stride, count``: three or more spans of one width at one distance are one."""
        rows = np.stack([self.low, self.high - self.low, np.zeros_like(self.low), np.ones_like(self.low)], 1)
        if len(rows) < 3:
            return rows
        step, alike = np.diff(self.low), rows[1:, 1] == rows[:-1, 1]
        # Link n is between the spans n and n + 1. It joins them if the link before or behind is the same.
        same = alike[1:] & alike[:-1] & (step[1:] == step[:-1])
        joins = np.append(same, False) | np.append(False, same)
        # A span where one distance ends and another begins belongs to the row before it.
        joins[1:] &= ~(joins[:-1] & ~same)
        first = np.flatnonzero(np.append(True, ~joins))
        count = np.diff(first, append=len(rows))
        rows = rows[first]
        rows[:, 2], rows[:, 3] = np.where(count > 1, np.append(step, 0)[first], 0), count
        return rows

    @cached_property
    def nbytes(self) -> int:
        """Number of bytes in the set."""
        return int((self.high - self.low).sum())

    @property
    def end(self) -> int:
        """One past the last byte; 0 for the empty set."""
        return int(self.high[-1]) if len(self.high) else 0

    def union(self, *others: Runs) -> Runs:
        """Return the bytes of any of them."""
        return Runs.of(np.concatenate([self.rows, *(other.rows for other in others)]))

    def intersect(self, other: Runs) -> Runs:
        """Return the bytes of both."""
        first = np.searchsorted(self.high, other.low, "right")
        stop = np.searchsorted(self.low, other.high, "left")
        theirs, number = _numbered(np.maximum(stop - first, 0))
        mine = first[theirs] + number
        return Runs(
            np.maximum(self.low[mine], other.low[theirs]), np.minimum(self.high[mine], other.high[theirs])
        )

    def within(self, low: int, high: int) -> Runs:
        """Return the bytes from ``low`` up to ``high``."""
        return self.intersect(Runs.of([(low, max(0, high - low), 0, 1)]))

    def batches(self, limit: int) -> Iterator[Runs]:
        """Yield the same bytes in parts of at most ``limit`` bytes."""
        span, number = _numbered(-(-(self.high - self.low) // limit))
        low = self.low[span] + number * limit
        high = np.minimum(low + limit, self.high[span])
        ends = np.cumsum(high - low)
        first, done = 0, 0
        while first < len(ends):
            stop = int(np.searchsorted(ends, done + limit, "right"))
            yield Runs(low[first:stop], high[first:stop])
            first, done = stop, int(ends[stop - 1])


def _numbered(counts: Numbers) -> tuple[Numbers, Numbers]:
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
