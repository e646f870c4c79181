"""Read small checkpoint files, identify files, and retry reads after transient errors."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zerostart.checkpoint.storage.base import HeaderBytes
from zerostart.errors import CheckpointError, CheckpointNotFoundError, ReadError


@dataclass(frozen=True, slots=True)
class FileState:
    """Size, time and inode of a file, to detect changes."""

    #: Size in bytes.
    size: int
    #: Modification time in nanoseconds.
    modified: int
    #: Inode number.
    number: int

    @classmethod
    def of(cls, file: int | str) -> FileState:
        """Return the state of a file. Raises OSError."""
        # The inode reveals a replaced file that has the same size and time.
        status = os.stat(file)  # noqa: PTH116
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)

    @classmethod
    def at(cls, path: str) -> FileState | None:
        """Return the state of a file, or None."""
        try:
            return cls.of(path)
        except OSError:
            return None

    def changed_to(self, now: FileState | None) -> str:
        """Describe the change to the state ``now``."""
        if now is None:
            return "was removed"
        if now.size != self.size:
            return f"has {now.size} bytes now and had {self.size}"
        return "was replaced by another file" if now.number != self.number else "was written to"


@contextlib.contextmanager
def open_regular(path: str, kind: str) -> Iterator[tuple[HeaderBytes, int]]:
    """Open a regular file: its bytes and size.

    ``kind`` names its format in messages. Raises CheckpointNotFoundError if there is none,
    CheckpointError if it is not a regular file, ReadError if it cannot be opened.
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
        # The open file, not its name: nothing can be swapped in between.
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: not a regular file, so it is not a {kind} file")
        yield _Opened(handle, path), status.st_size
    finally:
        os.close(handle)


def read_small(path: str, limit: int = 4096, kind: str = "training") -> bytes:
    """Read a file of at most ``limit`` bytes.

    ``kind`` names its format in messages. Raises as ``open_regular``, and CheckpointError for a longer
    file.
    """
    with open_regular(path, kind) as (handle, size):
        if size > limit:
            raise CheckpointError(f"{path}: its {size} bytes are beyond the limit of {limit} for such a file")
        return handle.read(limit, 0)


class _Opened:
    def __init__(self, handle: int, path: str) -> None:
        self._handle, self._path = handle, path

    def read(self, length: int, offset: int) -> bytes:
        chunks = []
        while length:
            try:
                chunk = os.pread(self._handle, length, offset)
            except OSError as error:
                raise ReadError(f"{self._path}: reading the header failed: {error.strerror}") from error
            # End of the file, which may have shrunk: the caller compares lengths.
            if not chunk:
                break
            chunks.append(chunk)
            length -= len(chunk)
            offset += len(chunk)
        return b"".join(chunks)


#: Transient errors of network file systems, and pauses before further attempts in seconds.
PASSING = frozenset({errno.EAGAIN, errno.EIO, errno.EBUSY, errno.ETIMEDOUT, errno.ENOBUFS, errno.EREMOTEIO})
DELAYS = (0.05, 0.1, 0.2, 0.4)


def read_some(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Read some bytes, retrying transient errors; 0 at the end."""
    for delay in DELAYS:
        try:
            return os.preadv(descriptor, buffers, offset)
        except OSError as error:
            if error.errno not in PASSING:
                raise
        time.sleep(delay)
    return os.preadv(descriptor, buffers, offset)
