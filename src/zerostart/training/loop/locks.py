"""Locks of files between processes, which end with the process that has them, however it ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from zerostart.errors import WriteError


def hold(stack: contextlib.ExitStack, path: Path, refusal: str, wait: bool = False) -> None:
    """Until ``stack`` ends, or this process, no other process holds the lock ``path``, which is made.

    Processes that are forked meanwhile do not hold it: workers that outlive a killed run keep nobody out.
    Raises WriteError where it cannot be made, and with the text ``refusal`` where another process holds it,
    unless its end is to be waited for.
    """
    # Open, lock, and look whether the path still leads to what was locked: whoever had the lock removes the
    # file, and a lock on a removed file keeps nobody out.
    while True:
        try:
            handle = path.open("ab")
        except OSError as error:
            raise WriteError(f"{path} cannot be made: {error.strerror}") from error
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                handle.close()
                raise WriteError(refusal) from error
            # A file system without locks: two runs at a time are not noticed.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(handle.fileno())):
                break
        handle.close()  # the one before has removed it meanwhile
    # Callbacks run in reverse: the file is removed while it is still locked.
    stack.enter_context(handle)
    stack.callback(path.unlink, missing_ok=True)
