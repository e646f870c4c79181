"""Which bytes of a file are there, where a machine has some of them: disjoint ranges in order."""

from __future__ import annotations

import heapq
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from zerostart.errors import CheckpointError

#: Beyond any file, so that no sum leaves 64 bits.
_MOST = 1 << 53


class Spans:
    """Ranges ``first byte, one past the last`` that do not touch, ascending. Needs neither torch nor numpy.

    Raises CheckpointError for any others.
    """

    def __init__(self, pairs: Sequence[int]) -> None:
        self._starts, self._ends = array("q", pairs[0::2]), array("q", pairs[1::2])
        flat = [*pairs, _MOST]
        if len(pairs) % 2 or (pairs and pairs[0] < 0) or any(a >= b for a, b in pairwise(flat)):
            raise CheckpointError("ranges of bytes that overlap, are out of order, or reach beyond any file")

    @classmethod
    def from_bytes(cls, data: bytes) -> Spans:
        """What ``to_bytes`` gave. Raises CheckpointError for anything else."""
        numbers = array("q")
        if len(data) % numbers.itemsize:
            raise CheckpointError(f"{len(data)} bytes are no numbers of {numbers.itemsize} bytes")
        numbers.frombytes(data)
        if sys.byteorder == "big":
            numbers.byteswap()
        return cls(numbers)

    def to_bytes(self) -> bytes:
        """Numbers of 8 bytes, little-endian."""
        numbers = array("q", [number for pair in self for number in pair])
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers.tobytes()

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._ends, strict=True)

    @property
    def nbytes(self) -> int:
        """How many bytes there are."""
        return sum(end - start for start, end in self)

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, int, bool]]:
        """The bytes from ``begin`` up to ``end`` in parts, and whether each is there."""
        at = bisect_right(self._starts, begin) - 1
        if at >= 0 and self._ends[at] <= begin:
            at += 1
        at = max(at, 0)
        while begin < end:
            start = self._starts[at] if at < len(self._starts) else end
            if start > begin:
                stop = min(start, end)
                yield begin, stop, False
            else:
                stop = min(self._ends[at], end)
                yield begin, stop, True
                at += 1
            begin = stop

    def covers(self, begin: int, end: int) -> bool:
        """Whether all bytes from ``begin`` up to ``end`` are there."""
        return all(there for *_, there in self.pieces(begin, end))


def first_gap(spans: Iterable[Spans], size: int) -> int | None:
    """The first byte of a file of ``size`` bytes that none of ``spans`` has; None if they have all."""
    reached = 0
    for start, end in heapq.merge(*spans):
        if start > reached:
            break
        reached = max(reached, end)
    return reached if reached < size else None
