"""Fail a file-changing system call, or simulate a kill."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

#: Functions of ``os`` that change files or directories, or flush them to disk.
CHANGING = (
    "open", "pwrite", "write", "ftruncate", "fsync", "mkdir", "rmdir", "rename", "replace", "unlink",
    "remove", "link", "symlink",
)  # fmt: skip
#: Error numbers of a full and of a broken disk.
FAILURES = (errno.ENOSPC, errno.EIO)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Killed(BaseException):
    """Simulated kill: later calls have no effect."""


class Calls:
    """Count file-changing calls; kill or fail one."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.chosen: int | None = None
        self.error: int | None = None
        self._dead = False
        #: Original functions of ``os``.
        self.originals: dict[str, Any] = {}

    def _intercept(self, name: str, call: Callable[[], Any]) -> Any:
        if self._dead:
            raise Killed
        self.names.append(name)
        if len(self.names) - 1 != self.chosen:
            return call()
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        with suppress(OSError):
            call()
        self._dead = True
        raise Killed

    @contextmanager
    def watch(self, chosen: int | None = None, error: int | None = None) -> "Iterator[Calls]":
        """Fail call number ``chosen`` with ``error``, or kill there."""
        self.names, self.chosen, self.error, self._dead = [], chosen, error, False
        self.originals = originals = {name: getattr(os, name) for name in CHANGING}
        # A killed process loses no written data, so syncs may be skipped.
        harmless = {**originals, "fsync": lambda handle: None}

        def wrapper_of(name: str) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                opens_to_read = name == "open" and not (args[1] if len(args) > 1 else 0) & _WRITING
                if opens_to_read and not self._dead:
                    return originals[name](*args, **kwargs)
                return self._intercept(name, lambda: harmless[name](*args, **kwargs))

            return call

        for name in CHANGING:
            setattr(os, name, wrapper_of(name))
        try:
            yield self
        except Killed:
            pass
        finally:
            for name, function in originals.items():
                setattr(os, name, function)
