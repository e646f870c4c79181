"""Reads that go round the page cache (``O_DIRECT``).

Such a read wants addresses, offsets and lengths in whole blocks, which tensors are not: it goes through an
aligned buffer, and from there to its place.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Sequence

import numpy as np

from zerostart.checkpoint.storage.retry import read_some

__all__ = ["BOUNCE_BYTES", "open_direct", "read_direct"]

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
