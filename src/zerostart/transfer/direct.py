"""Reads that go round the page cache (``O_DIRECT``), and finding out whether they are faster.

Such a read wants addresses, offsets and lengths in whole blocks, which tensors are not: it goes through an
aligned buffer, and from there to its place.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from zerostart.transfer.retry import read_some

__all__ = ["BOUNCE_BYTES", "Trial", "open_direct", "read_direct"]

#: Covers the block of every device and file system in use.
BLOCK = 4096
#: Bytes of one thread's aligned buffer.
BOUNCE_BYTES = 2 << 20


def open_direct(path: str) -> int | None:
    """A descriptor for reads round the page cache; None where the file system has none."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise


def read_direct(
    descriptor: int,
    buffers: Sequence[memoryview],
    offset: int,
    size: int,
    bounce: mmap.mmap,
    missed: Callable[[], None],
) -> int:
    """Fill the start of ``buffers`` from ``offset`` on, through ``bounce``; bytes filled, 0 at the end."""
    begin = offset // BLOCK * BLOCK
    wanted = sum(map(len, buffers))
    length = min(len(bounce), -(-(offset + wanted - begin) // BLOCK) * BLOCK)
    with memoryview(bounce) as whole:
        got = read_some(descriptor, [whole[:length]], begin, size, missed)
    ready = np.frombuffer(bounce, np.uint8, count=max(0, got))[offset - begin :][:wanted]
    done = 0
    for buffer in buffers:
        part = ready[done : done + len(buffer)]
        np.copyto(np.frombuffer(buffer, np.uint8)[: len(part)], part)  # without the interpreter's lock
        done += len(part)
    return done


@dataclass
class _Window:
    """What has been read in one way: bytes asked for, bytes done, and seconds of the threads."""

    asked: int = 0
    done: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.done / self.seconds if self.seconds else 0.0


class Trial:
    """Tries both ways on the first reads of a load, and stays with the better; shared by threads.

    The first ``window`` bytes are read through the page cache, the next ones round it. Reading round it is
    kept only if it is ``gain`` times as fast: pages left in the cache serve the next start.
    """

    def __init__(self, window: int = 64 << 20, gain: float = 1.2) -> None:
        self._window = window
        self._gain = gain
        self._buffered, self._direct = _Window(), _Window()
        self._chosen: bool | None = None
        self._lock = threading.Lock()

    def direct(self, nbytes: int) -> bool:
        """Whether the next read, of ``nbytes``, goes round the page cache."""
        with self._lock:
            if self._chosen is not None:
                return self._chosen
            for window, direct in ((self._buffered, False), (self._direct, True)):
                if window.asked < self._window:
                    window.asked += nbytes
                    return direct
            return False

    @property
    def uses_direct(self) -> bool:
        """Whether it has been settled that reads go round the page cache."""
        return self._chosen is True

    def note(self, direct: bool, nbytes: int, seconds: float) -> None:
        """A read of ``nbytes`` took ``seconds``."""
        with self._lock:
            window = self._direct if direct else self._buffered
            window.done += nbytes
            window.seconds += seconds
            if self._chosen is None and min(self._direct.done, self._buffered.done) >= self._window:
                self._chosen = self._direct.rate > self._gain * self._buffered.rate

    def refuse(self) -> None:
        """The file system does not take such reads after all."""
        with self._lock:
            self._chosen = False

    def __str__(self) -> str:
        if not self._direct.done:
            return "through the page cache"
        way = "round" if self._chosen else "through"
        return (
            f"{way} the page cache (a thread had {self._buffered.rate / 1e9:.2f} GB/s through it, "
            f"{self._direct.rate / 1e9:.2f} round it)"
        )
