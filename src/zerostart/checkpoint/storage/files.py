"""Reading the small parts of checkpoint files: headers and directories."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator

from zerostart.errors import CheckpointError, CheckpointNotFoundError, ReadError

__all__ = ["open_regular", "read_at"]


@contextlib.contextmanager
def open_regular(path: str, kind: str) -> Iterator[tuple[int, int]]:
    """Descriptor and size in bytes of the regular file ``path``; ``kind`` names its format in messages.

    Raises CheckpointNotFoundError if there is none, CheckpointError if it is not a regular file, ReadError
    if it cannot be opened.
    """
    try:
        # Without O_NONBLOCK, opening a FIFO would wait for a writer before its type can be looked at.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{path}: there is no such file") from error
    except OSError as error:
        raise ReadError(f"{path}: cannot be opened: {error.strerror}") from error
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: not a regular file, so it cannot be a {kind} checkpoint")
        yield handle, status.st_size
    finally:
        os.close(handle)


def read_at(handle: int, length: int, offset: int, path: str) -> bytes:
    """``length`` bytes from ``offset`` on, fewer only at the end of the file; raises ReadError."""
    chunks = []
    while length:
        try:
            chunk = os.pread(handle, length, offset)
        except OSError as error:
            raise ReadError(f"{path}: reading the header failed: {error.strerror}") from error
        if not chunk:
            break
        chunks.append(chunk)
        length -= len(chunk)
        offset += len(chunk)
    return b"".join(chunks)
