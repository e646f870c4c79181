"""A plan as plain data: it can be printed, summed, compared and run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from zerostart.checkpoint.memory import Memory

__all__ = ["Destination", "Part", "Plan", "Read"]


@dataclass(frozen=True, slots=True)
class Destination:
    """Local storage that the plan fills: ``numel`` elements of ``dtype``, the first ``owned`` of them real.

    ``direct`` tells storage that a read may land in (host memory) from storage behind a staging buffer.
    """

    name: str
    numel: int
    owned: int
    dtype: torch.dtype
    direct: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the storage, padding included."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Part:
    """What becomes of the bytes at ``at`` of a read.

    They are elements of ``dtype`` and go to destination number ``target`` from element ``to`` on, by
    ``loops`` of (size, source stride, destination stride). ``direct`` parts are one unbroken run on both
    sides with no cast, and can be read into place.
    """

    at: int
    dtype: torch.dtype
    target: int
    to: int
    loops: tuple[tuple[int, int, int], ...]
    direct: bool

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the last source element of the part, both included."""
        return (1 + sum((size - 1) * stride for size, stride, _ in self.loops)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Read:
    """One positioned read of ``nbytes`` at ``offset`` of file number ``file``.

    ``direct`` reads scatter into their parts' final places, which then tile the read without gaps;
    the others go through a staging buffer. A read of several ``rows`` takes that many runs of equal length,
    ``stride`` bytes from start to start, and leaves out what lies between them: its bytes are those of the
    runs, one after the other, and it has one part.
    """

    file: int
    offset: int
    nbytes: int
    parts: tuple[Part, ...]
    direct: bool
    rows: int = 1
    stride: int = 0


@dataclass(frozen=True)
class Plan:
    """Everything that one rank reads, from which files (or from which ``memory``), into which storage."""

    files: tuple[str, ...]
    sizes: tuple[int, ...]
    destinations: tuple[Destination, ...]
    reads: Sequence[Read]
    chunk_size: int
    memory: Memory | None = field(default=None, compare=False, repr=False)

    @property
    def read_bytes(self) -> int:
        """Bytes that the rank reads, merged gaps included."""
        return sum(read.nbytes for read in self.reads)

    @property
    def device_bytes(self) -> int:
        """Bytes of the destinations together."""
        return sum(destination.nbytes for destination in self.destinations)

    @property
    def staged(self) -> bool:
        """Whether any read needs a staging buffer."""
        return any(not read.direct for read in self.reads)
