"""Free space of a file system, looked at before anything is written: a full one harms whoever else writes."""

from __future__ import annotations

import os
from pathlib import Path

from rich.filesize import decimal

from zerostart.errors import WriteError


def free_space(path: str | os.PathLike[str]) -> int | None:
    """Bytes that this user may still write at ``path``, which need not be there yet; None where unknown."""
    place = Path(os.path.abspath(path))  # noqa: PTH100  # links are followed by the call below
    try:
        while not place.exists() and place != place.parent:
            place = place.parent
        found = os.statvfs(place)
    except OSError:  # also of a folder that may not be searched: whoever writes there says what is wrong
        return None
    # Object stores that are mounted have no blocks to count.
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def check_space(path: str | os.PathLike[str], nbytes: int, what: str) -> None:
    """Raise WriteError where ``what``, of so many bytes, does not fit on the file system of ``path``."""
    free = free_space(path)
    if free is not None and nbytes > free:
        raise WriteError(
            f"{os.fspath(path)}: {what} takes {decimal(nbytes)}, and {decimal(free)} are free on this file "
            "system; free more, or name a directory on another one"
        )
