"""Direct reads and writes (``O_DIRECT``), which bypass the page cache.

Addresses, offsets and lengths must be whole blocks. A read is copied through an aligned buffer. A write
transfers only whole pages, from memory with the same offset in its pages as in those of the file.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence

import numpy as np

from zerostart.checkpoint.storage.files import read_some

#: Alignment in bytes that suits every device and file system in use.
BLOCK = 4096
#: Smallest unit of the page cache in bytes. Direct and cached writes must not share one.
PAGE = max(BLOCK, mmap.PAGESIZE)
#: Bytes of one thread's aligned buffer.
BOUNCE_BYTES = 2 << 20


def open_direct(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int | None:
    """Open a file for direct access, if supported.

    Return None if it is not supported. Raises OSError.
    """
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
    """Read at ``offset`` through ``bounce``; return the byte count.

    0 means the end of the file.
    """
    begin = offset // BLOCK * BLOCK
    total = sum(map(len, buffers))
    length = min(len(bounce), -(-(offset + total - begin) // BLOCK) * BLOCK)
    with memoryview(bounce) as whole:
        count = read_some(descriptor, [whole[:length]], begin)
    ready = np.frombuffer(bounce, np.uint8, count=max(0, count))[offset - begin :][:total]
    filled = 0
    for buffer in buffers:
        part = ready[filled : filled + len(buffer)]
        np.copyto(np.frombuffer(buffer, np.uint8)[: len(part)], part)  # without the interpreter's lock
        filled += len(part)
    return filled


def whole_pages(view: memoryview, offset: int) -> tuple[int, int]:
    """Return the range of ``view`` with whole pages.

    ``offset`` is that of the write. Empty if memory and file have different offsets in their pages.
    """
    begin = min(-offset % PAGE, view.nbytes)
    address = np.frombuffer(view, np.uint8).ctypes.data if view.nbytes else 0
    if (address - offset) % PAGE:
        return begin, begin
    return begin, begin + (view.nbytes - begin) // PAGE * PAGE
