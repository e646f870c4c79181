"""Files and directories that are on the disk before anything goes on."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from pathlib import Path
from typing import Any

#: sync_file_range(2): have the system begin to write what is in memory alone, and wait for nothing.
_RANGE_WRITE = 2


def write_whole(path: Path, data: bytes, part: Path, durable: bool = True) -> None:
    """Write ``path`` under the name ``part`` beside it first, so that it is never there in part.

    With ``durable`` its bytes are on the disk before it has its name; the name itself is once the directory
    is synced. Raises OSError.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    handle = os.open(part, flags, 0o666)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(handle, left) :]
        if durable:
            os.fsync(handle)
    finally:
        os.close(handle)
    part.replace(path)


def sync_directory(directory: Path) -> None:
    """Bring the names in a directory to the disk. Raises OSError."""
    sync(directory, os.O_DIRECTORY)


def sync(path: Path, flags: int = 0) -> None:
    """Bring the bytes of a file to the disk, whoever wrote them. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    try:
        sync_handle(handle)
    finally:
        os.close(handle)


def sync_handle(handle: int) -> None:
    """Bring an open file or directory to the disk; a file system may know no such thing of directories."""
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP, errno.ENOSYS):
            raise


def begin_writeback(handle: int, begin: int, end: int) -> None:
    """Have bytes of a file on their way to the disk while others are still being made.

    A later ``fsync`` finds them there, and tells what went wrong; where the system has no such call it has
    everything to do.
    """
    call = _sync_file_range()
    if call is not None:
        call(handle, begin, end - begin, _RANGE_WRITE)


@functools.cache
def _sync_file_range() -> Any:
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call
