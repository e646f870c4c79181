"""Gathering rows: many runs of a file at equal distances, by a few system calls.

A call for each row costs more than copying it, and holds the interpreter's lock besides. So the file's span
is mapped, and ``process_vm_readv`` (Linux; see its manual page) copies up to 1024 rows out of the mapping at
once. Unlike a plain access to the mapping it answers a page that cannot be read with an error and not with a
fatal signal. Where the call is not permitted, each row is read on its own.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import sys

import numpy as np
import numpy.typing as npt

from zerostart.checkpoint.storage.base import Rows

#: Most vectors that one call takes (Linux: UIO_MAXIOV).
MOST = 1024
#: The kernel limits one advice to its read-ahead window, 128 KiB unless it is set otherwise.
ADVICE = 512 << 10

Vectors = npt.NDArray[np.uint64]


def advise(descriptor: int, offset: int, rows: Rows) -> None:
    """Ask the kernel to fetch the rows into the page cache; costs little where they are in it."""
    if not hasattr(os, "posix_fadvise"):
        return
    for start, length in rows.extents():
        for at in range(start, start + length, ADVICE):
            os.posix_fadvise(
                descriptor, offset + at, min(ADVICE, start + length - at), os.POSIX_FADV_WILLNEED
            )


def gather(descriptor: int, offset: int, rows: Rows, target: memoryview, step: int) -> int:
    """Copy the first rows into ``target``, ``step`` bytes from start to start; returns how many it could.

    A caller reads the others one by one, and learns from that why they could not be copied.
    """
    if not vectored():
        return 0
    shift = offset % mmap.ALLOCATIONGRANULARITY
    try:
        mapping = mmap.mmap(
            descriptor, shift + rows.span, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset - shift
        )
    except (OSError, ValueError):  # no mappings on this file system, or the file is shorter now
        return 0
    with mapping:
        if hasattr(mmap, "MADV_RANDOM"):
            mapping.madvise(mmap.MADV_RANDOM)  # else the kernel reads around each page that is absent
        source = np.frombuffer(mapping, np.uint8)
        begin = source.ctypes.data + shift
        place = np.frombuffer(target, np.uint8).ctypes.data
        done = 0
        while done < rows.count:
            count = min(MOST, rows.count - done)
            got = _copy(
                _vectors(begin + done * rows.stride, rows.stride, rows.width, count),
                _vectors(place + done * step, step, rows.width, count),
            )
            done += got // rows.width
            if got < count * rows.width:
                break
        del source  # a mapping cannot be closed while it is looked at
    return done


def _vectors(start: int, stride: int, width: int, count: int) -> Vectors:
    """``count`` times ``struct iovec {address, length}``; one if they follow each other."""
    if stride == width:
        return np.array([[start, count * width]], np.uint64)
    table = np.empty((count, 2), np.uint64)
    table[:, 0] = np.arange(start, start + count * stride, stride, dtype=np.uint64)
    table[:, 1] = width
    return table


def _copy(source: Vectors, target: Vectors) -> int:
    """Bytes copied within this process, 0 if none could be."""
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    call.restype = ctypes.c_ssize_t
    got = call(
        ctypes.c_int(os.getpid()),
        ctypes.c_void_p(target.ctypes.data),
        ctypes.c_ulong(len(target)),
        ctypes.c_void_p(source.ctypes.data),
        ctypes.c_ulong(len(source)),
        ctypes.c_ulong(0),
    )
    return max(0, int(got))


@functools.cache
def vectored() -> bool:
    """Whether ``process_vm_readv`` is there and permitted on this process itself."""
    if not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "process_vm_readv"):
        return False
    source, target = np.ones(1, np.uint8), np.zeros(1, np.uint8)
    one = [np.array([[a.ctypes.data, 1]], np.uint64) for a in (source, target)]
    return _copy(one[0], one[1]) == 1 and ctypes.get_errno() != errno.ENOSYS and bool(target[0])
