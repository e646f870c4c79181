"""A folder of a running job in shared memory: made for one refitter, and removed when its owner is gone."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
import uuid
from pathlib import Path

from zerostart.errors import WriteError

PREFIX = "zerostart-refit-"
_LOCK = "owner"
#: Where memory is shared as files.
SHARED = Path("/dev/shm")
#: Folders of this process: a lock keeps out other processes, and not this one.
_own: set[Path] = set()


class Place:
    """A folder that its owner alone can enter, in memory where the system has such a place.

    While the owner lives it holds a lock on a file in it, by which others tell it from what a killed job has
    left behind. Raises WriteError where no folder can be made.
    """

    def __init__(self) -> None:
        root = SHARED if os.access(SHARED, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
        remove_stale(root)
        self.path = root / f"{PREFIX}{uuid.uuid4().hex[:16]}"
        # Under another name until it is locked, so that nobody takes it for one that was left behind.
        made = root / f".{self.path.name}"
        try:
            made.mkdir(mode=0o700)
            self._lock = os.open(made / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            # Of the process, not of the file: what is forked from it does not keep the lock.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _own.add(self.path)
            made.rename(self.path)
        except OSError as error:
            shutil.rmtree(made, ignore_errors=True)
            raise WriteError(f"{made}: a folder for a refit cannot be made: {error.strerror}") from error
        self._owner = os.getpid()
        # A script that ends without ``close`` leaves no image in memory.
        atexit.register(self.close)

    def close(self) -> None:
        """Remove the folder and what is in it; raises nothing."""
        atexit.unregister(self.close)
        if os.getpid() != self._owner:
            return  # forked from the owner, which goes on
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)
        _own.discard(self.path)


def remove_stale(root: Path = SHARED) -> None:
    """Remove the folders in ``root`` of this user's jobs that have ended without doing so; raises nothing."""
    with contextlib.suppress(OSError):
        for path in [*root.glob(f"{PREFIX}*")]:
            if path not in _own and _is_left(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_left(path: Path) -> bool:
    with contextlib.suppress(OSError):
        if path.is_symlink() or path.stat().st_uid != os.geteuid():
            return False
        handle = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        finally:
            os.close(handle)
    return False
