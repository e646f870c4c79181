"""What has changed of bytes that the other side already has: found, packed, unpacked, and noted by blocks.

A difference is the exclusive or of what is there now and what was there before, so zeros say that nothing has
changed. It travels as ``pack`` makes it: gaps of one byte and the differences that end them.
"""

from __future__ import annotations

import mmap
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]
#: A gap of as many units, after which none has changed.
SKIP = 255
#: Differences that would take more than this part of all bytes are sent with the zeros between: units of two
#: bytes, of which more than a sixth has changed.
DENSE = 4
#: Bytes of a block by which a worker is told, or notes, what has changed.
BLOCK = 1 << 16


class Packed(NamedTuple):
    """The changed units of a row of bytes."""

    #: Before each changed unit how many have not changed; ``SKIP`` stands for so many and no changed one.
    gaps: Bytes
    #: The changed units, one after the other.
    differences: Bytes


def unit_of(rows: Numbers) -> int:
    """Bytes of a unit, for bytes that lie as ``Runs.rows`` says: two, or one where some begin at odd ones."""
    return 1 if (rows[:, :3] & 1).any() else 2


def pack(difference: Bytes, unit: int) -> Packed | None:
    """The changed units of ``difference``; None where these are too many for it to pay."""
    words = difference.view(f"u{unit}")
    places = np.flatnonzero(words != 0)  # of truths it is several times as fast as of numbers
    gaps = np.diff(places, prepend=-1) - 1
    ends = np.cumsum(gaps // SKIP + 1)
    count = int(ends[-1]) if len(ends) else 0
    if (count + len(places) * unit) * DENSE > difference.nbytes:
        return None
    codes = np.full(count, SKIP, np.uint8)
    codes[ends - 1] = gaps % SKIP
    return Packed(codes, words[places].view(np.uint8))


def unpack(packed: Packed, unit: int) -> tuple[Numbers, npt.NDArray[np.unsignedinteger]]:
    """Which units have changed, and their differences; raises ValueError for what ``pack`` did not make."""
    ends = packed.gaps != SKIP
    places = (np.cumsum(packed.gaps, dtype=np.int64) + np.cumsum(ends, dtype=np.int64))[ends] - 1
    differences = packed.differences.view(f"u{unit}")
    if len(places) != len(differences):
        raise ValueError(f"{len(differences)} differences for {len(places)} places")
    return places, differences


def places_in(rows: Numbers, places: Numbers) -> Numbers:
    """Where in the image bytes are that are number ``places`` of those of ``rows``, one row after the other.

    ``places`` ascend. Raises ValueError where there are not so many.
    """
    ends = np.cumsum(rows[:, 1] * rows[:, 3])
    if len(places) and (not len(ends) or places[-1] >= ends[-1]):
        raise ValueError("a place behind the last byte")
    row = np.searchsorted(ends, places, "right")
    start, width, stride, count = rows[row].T
    number, inside = np.divmod(places - (ends[row] - width * count), np.maximum(width, 1))
    found: Numbers = start + number * stride + inside
    return found


class Blocks:
    """By block of an image the version in which it has last changed, as far as somebody has noted it."""

    def __init__(self, nbytes: int, memory: mmap.mmap | None = None) -> None:
        """Of an image of ``nbytes``; in ``memory`` of ``room(nbytes)`` that others may have, too."""
        count = self.room(nbytes) // 8
        self._versions = np.zeros(count, np.int64) if memory is None else np.frombuffer(memory, np.int64)

    @staticmethod
    def room(nbytes: int) -> int:
        """Bytes that it takes."""
        return (-(-nbytes // BLOCK)) * 8

    def note(self, low: int, high: int, version: int) -> None:
        """Bytes from ``low`` up to ``high`` may have changed in ``version``."""
        self._versions[low // BLOCK : -(-high // BLOCK)] = version

    def note_places(self, places: Numbers, version: int) -> None:
        """Those bytes have."""
        self._versions[places // BLOCK] = version

    def since(self, version: int) -> Changed:
        """What has been noted in later versions."""
        return Changed(np.concatenate([[0], np.cumsum(self._versions > version)]))


class Changed:
    """Which blocks of an image may have changed since a version."""

    def __init__(self, before: Numbers) -> None:
        """``before`` counts, for each block, the changed ones before it, and at the end all."""
        self._before = before

    def between(self, low: int, high: int) -> bool:
        """Whether any byte from ``low`` up to ``high`` may have."""
        return bool(self._before[-(-high // BLOCK)] > self._before[low // BLOCK])
