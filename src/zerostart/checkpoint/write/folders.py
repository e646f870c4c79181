"""An open directory, below which nothing is read, written or removed by way of a link."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import hashlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from zerostart.errors import WriteError

#: What tells a file from a later one of its name: inode, bytes, and time of the last change in nanoseconds.
Identity = list[int]
#: What a system answers that gives no second name to a file here.
NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
#: RENAME_NOREPLACE of renameat2(2), which file systems have that give no file a second name, as vfat.
_NO_REPLACE = 1
#: The mode of a file that keeps a name for another, where a file cannot have two names.
_RESERVED = 0o600
#: Seconds to wait for another save into the same directory, which is busy with names alone.
_PATIENCE = 60.0


class Folder:
    """Names are paths from the directory, with slashes; every method raises OSError."""

    def __init__(self, path: Path, follow: bool = True) -> None:
        """Open ``path``; without ``follow`` it may be no link itself."""
        self._handle = os.open(path, _DIRECTORY | (0 if follow else os.O_NOFOLLOW))
        self.path = path

    def close(self) -> None:
        """Close the directory; it may be called more than once."""
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1

    @contextlib.contextmanager
    def parent(self, name: str) -> Iterator[tuple[int, str]]:
        """A handle of the directory that has ``name``, and the last part of the name."""
        *folders, last = PurePosixPath(name).parts
        # From the open directory down, never by a path from the root: the directory may be renamed meanwhile,
        # and no link on the way is followed (O_NOFOLLOW).
        handle = os.dup(self._handle)
        try:
            for folder in folders:
                inner = os.open(folder, _DIRECTORY | os.O_NOFOLLOW, dir_fd=handle)
                os.close(handle)
                handle = inner
            yield handle, last
        finally:
            os.close(handle)

    def identity(self, name: str, regular: bool = False, link: bool = False) -> Identity | None:
        """That of what has this name, be it a link; None for nothing, and if asked for what is no file.

        With ``link`` a link, which is not followed, is as good as a file.
        """
        try:
            with self.parent(name) as (handle, last):
                found = os.stat(last, dir_fd=handle, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if regular and not (stat.S_ISREG(found.st_mode) or (link and stat.S_ISLNK(found.st_mode))):
            return None
        return [found.st_ino, found.st_size, found.st_mtime_ns]

    def sha256(self, name: str) -> str | None:
        """The hash of a file; None of what is no file."""
        if self.identity(name, regular=True) is None:
            return None
        with (
            self.parent(name) as (handle, last),
            os.fdopen(os.open(last, _FILE, dir_fd=handle), "rb") as file,
        ):
            return hashlib.file_digest(file, "sha256").hexdigest()

    def make(self, folder: str) -> list[str]:
        """Make a directory and those above it, where they are not there; gives those that were made."""
        made = []
        parts = PurePosixPath(folder).parts
        for count in range(1, len(parts) + 1):
            name = "/".join(parts[:count])
            with self.parent(name) as (handle, last), contextlib.suppress(FileExistsError):
                os.mkdir(last, dir_fd=handle)
                made.append(name)
        return made

    def put(self, source: str, name: str) -> None:
        """Give a file a name that nothing has. Raises FileExistsError where something has it."""
        with self.parent(source) as (old, begin), self.parent(name) as (new, end):
            try:
                # A link fails where the name is taken, which a rename does not; and a kill between it and the
                # unlink below leaves two names of one file, which `finish` knows.
                os.link(begin, end, src_dir_fd=old, dst_dir_fd=new, follow_symlinks=False)
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                if not _renamed(old, begin, new, end):
                    # The name is ours from here on, and the file follows.
                    # Neither links nor renameat2 here (some network file systems): an empty file with a mode
                    # of its own reserves the name, so that a killed save's is told from a user's.
                    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                    os.close(os.open(end, flags, _RESERVED, dir_fd=new))
                    os.replace(begin, end, src_dir_fd=old, dst_dir_fd=new)
            else:
                os.unlink(begin, dir_fd=old)

    def is_reserved(self, name: str) -> bool:
        """Whether a name has an empty file that ``put`` was killed over, and nobody has used since."""
        try:
            with self.parent(name) as (handle, last):
                found = os.stat(last, dir_fd=handle, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        regular = stat.S_ISREG(found.st_mode) and stat.S_IMODE(found.st_mode) == _RESERVED
        return regular and found.st_size == 0 and found.st_uid == os.geteuid()

    def replace(self, source: str, name: str) -> None:
        """Give a file a name that another one, or a link, may have, in one step."""
        with self.parent(source) as (old, begin), self.parent(name) as (new, end):
            os.replace(begin, end, src_dir_fd=old, dst_dir_fd=new)

    def remove(self, name: str, known: Identity | None = None) -> None:
        """Remove a file, if it is one and, where that is ``known``, still the same; that may be a link."""
        found = self.identity(name, regular=True, link=known is not None)
        if found is not None and known in (None, found):
            with self.parent(name) as (handle, last), contextlib.suppress(FileNotFoundError):
                os.unlink(last, dir_fd=handle)

    def remove_empty(self, folder: str) -> None:
        """Remove a directory if there is nothing in it, and if that can be done."""
        with contextlib.suppress(OSError), self.parent(folder) as (handle, last):
            os.rmdir(last, dir_fd=handle)

    def sync(self, name: str) -> None:
        """Bring the names beside ``name`` to the disk."""
        with self.parent(name) as (handle, _):
            sync_handle(handle)

    @contextlib.contextmanager
    def alone(self, wait: bool = True) -> Iterator[bool]:
        """Inside no other save changes names here; gives False, at once, where one does and not to ``wait``.

        Raises WriteError where another one takes longer than a minute.
        """
        end = time.monotonic() + _PATIENCE
        # None (no locks on this file system) goes on: saves there are told apart by the names of their files
        # alone.
        while (locked := lock(self._handle)) is False and wait:
            if time.monotonic() > end:
                raise WriteError(
                    f"{self.path}: another process is saving to this directory; save again when it has ended"
                )
            time.sleep(0.01)
        try:
            yield locked is not False
        finally:
            if locked:
                fcntl.flock(self._handle, fcntl.LOCK_UN)


def _renamed(old: int, begin: str, new: int, end: str) -> bool:
    """Rename where nothing has the name, in one step (renameat2(2)); gives False where that is not to be had.

    Raises FileExistsError where something has it.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None or call(old, os.fsencode(begin), new, os.fsencode(end), _NO_REPLACE) == 0:
        return call is not None
    if (number := ctypes.get_errno()) == errno.EEXIST:
        raise FileExistsError(number, os.strerror(number), end)
    return False


def lock(handle: int) -> bool | None:
    """Whether a handle is locked now, until it is closed or this process ends; None: there are no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


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
        # All others, EIO and ENOSPC first, say that bytes may be lost: these are the caller's.
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
