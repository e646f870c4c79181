"""Paths as users write them, and directories that threads of this process are still publishing."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from zerostart.errors import ConfigError


def expanded(path: str | os.PathLike[str]) -> Path:
    """``path`` with the home directory that ``~`` or ``~user`` stands for.

    Raises ConfigError where no user has that name, and for a text that no system takes for a path.
    """
    try:
        found = Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{os.fspath(path)}: no user of that name has a home directory") from None
    if "\0" in str(found):
        raise ConfigError(f"{os.fspath(path)!r} is not a path: it contains a NUL character")
    return found


#: The real path of a directory, and the thread at whose end it is there, or will never be.
_pending: list[tuple[Path, threading.Thread]] = []


def note_pending(path: Path, thread: threading.Thread) -> None:
    """Have those who read ``path``, or something in it or around it, wait for the end of ``thread``."""
    _pending[:] = [item for item in _pending if item[1].is_alive()]
    _pending.append((_real(path), thread))


def wait_for(path: str | os.PathLike[str]) -> None:
    """Return when nothing in this process is publishing ``path``, a part of it, or what it is a part of."""
    if not _pending:
        return
    place = _real(path)
    for other, thread in list(_pending):
        near = place == other or place in other.parents or other in place.parents
        if near and thread is not threading.current_thread():
            thread.join()


def is_same(one: Path, other: Path) -> bool:
    """Whether two paths are one place, by whatever links."""
    return _real(one) == _real(other)


def _real(path: str | os.PathLike[str]) -> Path:
    return Path(os.path.realpath(expanded(path)))
