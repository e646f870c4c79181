"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path

from zerostart.errors import ConfigError


def expanded(path: str | os.PathLike[str]) -> Path:
    """``path`` with the home directory that ``~`` or ``~user`` stands for.

    Raises ConfigError where no user has that name, and for a text that no system takes for a path.
    """
    try:
        found = Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{os.fspath(path)}: there is no home directory of that name") from None
    if "\0" in str(found):
        raise ConfigError(f"{os.fspath(path)!r} is not a path: it has a NUL character")
    return found
