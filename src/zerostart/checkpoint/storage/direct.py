"""Reads and writes that go round the page cache (``O_DIRECT``).

They want addresses, offsets and lengths in whole blocks, which tensors are not: a read goes through an
aligned buffer, and from there to its place; of a write the whole pages go this way, out of memory that lies
in its pages as the bytes do in those of the file.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence

import numpy as np

from zerostart.checkpoint.storage.files import read_some

#: Covers the block of every device and file system in use.
BLOCK = 4096
#: What the page cache has whole or not at all: what is written past it must share none with what is not.
PAGE = max(BLOCK, mmap.PAGESIZE)
#: Bytes of one thread's aligned buffer.
BOUNCE_BYTES = 2 << 20


def open_direct(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int | None:
    """A descriptor that goes round the page cache; None where the file system has none. Raises OSError."""
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise


def read_direct(
    descriptor: int,
    buffers: Sequence[memoryview],
    offset: int,
    bounce: mmap.mmap,
) -> int:
    """Fill the start of ``buffers`` from ``offset`` on, through ``bounce``; bytes filled, 0 at the end."""
    begin = offset // BLOCK * BLOCK
    wanted = sum(map(len, buffers))
    length = min(len(bounce), -(-(offset + wanted - begin) // BLOCK) * BLOCK)
    with memoryview(bounce) as whole:
        got = read_some(descriptor, [whole[:length]], begin)
    ready = np.frombuffer(bounce, np.uint8, count=max(0, got))[offset - begin :][:wanted]
    done = 0
    for buffer in buffers:
        part = ready[done : done + len(buffer)]
        np.copyto(np.frombuffer(buffer, np.uint8)[: len(part)], part)  # without the interpreter's lock
        done += len(part)
    return done


def whole_pages(view: memoryview, offset: int) -> tuple[int, int]:
    """The range of ``view`` that is whole pages of the file and of memory, if it is written at ``offset``.

    Empty where memory and file do not lie in their pages alike.
    """
    begin = min(-offset % PAGE, view.nbytes)
    address = np.frombuffer(view, np.uint8).ctypes.data if view.nbytes else 0
    if (address - offset) % PAGE:
        return begin, begin
    return begin, begin + (view.nbytes - begin) // PAGE * PAGE
