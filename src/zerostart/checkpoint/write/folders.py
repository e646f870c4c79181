"""Locks of directories, writes that reach the disk, and its free space."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from rich.filesize import decimal

from zerostart.checkpoint.manifest import HIDDEN
from zerostart.errors import WriteError

#: Seconds to wait for another save into the same directory.
LOCK_TIMEOUT_S = 60.0
LOCK_NAME = "lock"


@contextlib.contextmanager
def lock_directory(path: Path, timeout: float = LOCK_TIMEOUT_S) -> Iterator[bool | None]:
    """Hold the lock of saves into ``path``.

    Yields False on a timeout, and None if the file system has no locks. The lock is a file, since network
    file systems cannot lock directories. A killed process releases it. Raises OSError, and WriteError if the
    lock's folder is a link.
    """
    hidden = path / HIDDEN
    end = time.monotonic() + timeout
    while True:
        if hidden.is_symlink():
            raise WriteError(f"{hidden} is a link, which no save follows: remove it, and save again")
        # Not ``exist_ok``: it fails if another save removes the folder between mkdir and its check.
        with contextlib.suppress(FileExistsError):
            hidden.mkdir()
        try:
            handle = os.open(hidden / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:  # another save has just ended and removed the folder
            continue
        is_locked = _lock(handle)
        if is_locked is not False and _is_file(hidden / LOCK_NAME, handle):
            break
        os.close(handle)
        if is_locked is False and time.monotonic() > end:
            yield False
            return
        time.sleep(0.01)
    try:
        yield is_locked
    finally:
        try:
            (hidden / LOCK_NAME).unlink()
            hidden.rmdir()
        except OSError as error:
            # A save that failed twice leaves files; the next one removes them.
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                raise
        finally:
            os.close(handle)


def _lock(handle: int) -> bool | None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def _is_file(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def write_whole(path: Path, data: bytes, part: Path) -> None:
    """Write a file under a temporary name, and rename it.

    Raises OSError.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    handle = os.open(part, flags, 0o666)
    try:
        pending = memoryview(data)
        while pending:
            pending = pending[os.write(handle, pending) :]
        os.fsync(handle)
    finally:
        os.close(handle)
    part.replace(path)


def sync_directory(directory: Path) -> None:
    """Sync the names in a directory to the disk. Raises OSError."""
    sync(directory, os.O_DIRECTORY)


def sync(path: Path, flags: int = 0) -> None:
    """Sync the bytes of a file to the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some file systems sync no directories. All other errors say that bytes may be lost.
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    finally:
        os.close(handle)


def free_space(path: str | os.PathLike[str]) -> int | None:
    """Return the free bytes at ``path``, or None.

    The path need not exist.
    """
    place = Path(os.path.abspath(path))  # noqa: PTH100  # the call below follows links
    try:
        while not place.exists() and place != place.parent:
            place = place.parent
        status = os.statvfs(place)
    except OSError:  # also for a folder without search permission: writing there reports the error
        return None
    # Mounted object stores have no blocks.
    return status.f_bavail * status.f_frsize if status.f_blocks else None


def check_space(path: str | os.PathLike[str], nbytes: int, content: str) -> None:
    """Raise WriteError if ``nbytes`` do not fit.

    ``content`` names the data in the message.
    """
    free = free_space(path)
    if free is not None and nbytes > free:
        raise WriteError(
            f"{os.fspath(path)}: {content} takes {decimal(nbytes)}, and {decimal(free)} are free on this "
            "file system; free more, or name a directory on another one"
        )
