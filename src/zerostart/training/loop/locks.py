"""File locks between processes; a lock ends with the process that holds it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from filelock import FileLock, Timeout

from zerostart.errors import WriteError

#: Seconds to wait for the workers of a killed run, which may hold its lock.
_WORKERS_END_S = 5.0


def hold(stack: contextlib.ExitStack, path: Path, refusal: str) -> None:
    """Hold the lock ``path`` until ``stack`` or this process ends.

    Raises WriteError if it cannot be made, and with the text ``refusal`` if another process holds it.
    """
    try:
        stack.enter_context(FileLock(path, timeout=_WORKERS_END_S))
    except Timeout as error:
        raise WriteError(refusal) from error
    except OSError as error:
        raise WriteError(f"{path} cannot be made: {error.strerror}") from error
    # Callbacks run in reverse: the file is removed while it is still locked.
    stack.callback(path.unlink, missing_ok=True)
