"""What a process does to the file system, call by call: each in turn fails, or is the last that it does."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

#: Everything of ``os`` that changes files or directories, or brings them to the disk.
CHANGING = (
    "open", "pwrite", "write", "ftruncate", "fsync", "mkdir", "rmdir", "rename", "replace", "unlink",
    "remove", "link", "symlink",
)  # fmt: skip
#: What a full disk and a lost one answer.
FAILURES = (errno.ENOSPC, errno.EIO)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Killed(BaseException):
    """This process is no more: nothing that it does from here on has an effect."""


class Calls:
    """Counts the calls that change files, and lets one of them be the last, or fail."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.chosen: int | None = None
        self.error: int | None = None
        self._dead = False
        #: The functions of ``os`` as they are without this.
        self.kept: dict[str, Any] = {}

    def _meet(self, name: str, call: Callable[[], Any]) -> Any:
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
    def watched(self, chosen: int | None = None, error: int | None = None) -> "Iterator[Calls]":
        """Inside, call number ``chosen`` fails with ``error`` or, without one, is the last one."""
        self.names, self.chosen, self.error, self._dead = [], chosen, error, False
        self.kept = kept = {name: getattr(os, name) for name in CHANGING}
        # A process that is killed takes nothing with it that it has written, synced or not.
        harmless = {**kept, "fsync": lambda handle: None}

        def watching(name: str) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                opens_to_read = name == "open" and not (args[1] if len(args) > 1 else 0) & _WRITING
                if opens_to_read and not self._dead:
                    return kept[name](*args, **kwargs)
                return self._meet(name, lambda: harmless[name](*args, **kwargs))

            return call

        for name in CHANGING:
            setattr(os, name, watching(name))
        try:
            yield self
        except Killed:
            pass
        finally:
            for name, function in kept.items():
                setattr(os, name, function)
