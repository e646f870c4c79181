"""Directories that appear whole or not at all.

What is to be saved is written into a directory beside its place, brought to the disk, marked as complete by a
file written last, and then takes its place in one step of the file system. Until then the place is as it was.

What a killed process leaves is told by its name, ``.NAME.TOKEN.saving`` (or ``.replaced``) beside ``NAME``,
and by a lock that nobody holds any more; the next save to ``NAME`` removes it. What is being removed is
``.NAME.TOKEN.removed``, of which nobody has any use.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from zerostart.checkpoint.durable import sync, sync_directory, write_whole
from zerostart.checkpoint.paths import expanded
from zerostart.checkpoint.replacing import MARKER, MARKERS, Replaced
from zerostart.errors import WriteError, ZerostartError

__all__ = ["FORMAT", "Staging", "recover", "remove", "told"]

#: The version of the markers.
FORMAT = 1
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
#: What a system or a file system answers that cannot exchange two directories.
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


class Staging:
    """A directory that is to take the place ``path``; one process has it, and writes or leads those who do.

    Everything is written below ``directory``. Then :meth:`complete` publishes it, or :meth:`discard` removes
    it, which may be called at any time, and more than once.
    """

    def __init__(self, path: str | os.PathLike[str], marker: str = MARKER) -> None:
        """Make the directory, after removing what killed processes have left. Raises WriteError."""
        # A link that leads to a directory goes on doing so.
        self.path = Path(os.path.realpath(expanded(path)))
        self.marker = marker
        with told(self.path, "nothing was saved"):
            self._check_place()
        self._token = uuid.uuid4().hex[:12]
        self._stays = _has_to_stay(self.path)
        beside = _beside(self.path, self._token, "saving")
        self.directory = self.path / beside.name if self._stays else beside
        self._made: list[Path] = []
        self._published = False
        self._lock: int | None = None
        try:
            self._begin()
        except BaseException:
            self.discard()
            raise

    def _begin(self) -> None:
        with told(self.path, "nothing was saved"):
            self._make_parents()
            recover(self.path)
            for leftover in _leftovers(self.path, self.directory.parent):
                _remove(leftover)
            self.directory.mkdir()
            self._lock = _locked(self.directory)

    def complete(self, document: Mapping[str, Any]) -> None:
        """Bring everything to the disk, write the marker, and put the directory in its place.

        The marker holds ``document``, and "files": for each file its "bytes" and, unless "digests" of
        ``document`` has the tensors of its folder, its "sha256"; what "files" of ``document`` says of a file
        is taken as it is. What lies at the place and is no part of what was saved there before is kept.
        Raises WriteError (of an OSError); the place is then as it was, unless the message says otherwise.

        A place that has to stay (a mount point, the working directory or one above it) gets the files one by
        one, the marker last: what was there is then no checkpoint any more from the first of them on.
        """
        with told(self.path, "nothing was saved, and what was there is as it was"):
            digested, known = document.get("digests", {}), document.get("files", {})
            below = _files_below(self.directory)
            files = {name: known.get(name) or self._described(name, digested) for name in below}
            replaced = Replaced(self.path, self.directory, files)
            if not self._stays:
                replaced.keep()
            for name in files:
                sync(self.directory / name)
            for folder, _, _ in os.walk(self.directory, topdown=False):
                sync_directory(Path(folder))
            self._write_marker({"format": FORMAT, **document, "files": files})
            if self._stays:
                self._fill_place(replaced)
                return
            old = self._take_place()
            self._published = True
        with told(self.path, "all is there, but may be lost if the machine stops now: save again"):
            sync_directory(self.path.parent)
            if old is not None:
                replaced.keep(old)
        self._release()
        if old is not None:
            _remove(old)

    def discard(self) -> None:
        """Remove what was written, unless it was published."""
        self._release()
        if self._published:
            return
        _remove(self.directory)
        for parent in reversed(self._made):
            with contextlib.suppress(OSError):
                parent.rmdir()

    def _check_place(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise WriteError(f"{self.path} is a file; save to a directory, or remove it")

    def _make_parents(self) -> None:
        missing = [parent for parent in self.path.parents if not parent.exists()]
        for parent in reversed(missing):
            with contextlib.suppress(FileExistsError):
                parent.mkdir()
                self._made.append(parent)
                sync_directory(parent.parent)

    def _described(self, name: str, digested: Mapping[str, Any]) -> dict[str, Any]:
        """What tells a file that it is as it was: its length, and a hash unless its tensors have digests."""
        file = self.directory / name
        described: dict[str, Any] = {"bytes": file.stat().st_size}
        if file.suffix != ".safetensors" or PurePosixPath(name).parent.as_posix() not in digested:
            with file.open("rb") as handle:
                described["sha256"] = hashlib.file_digest(handle, "sha256").hexdigest()
        return described

    def _write_marker(self, document: Mapping[str, Any]) -> None:
        data = (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode()
        write_whole(self.directory / self.marker, data, self.directory / f".{self.marker}.part")
        sync_directory(self.directory)

    def _take_place(self) -> Path | None:
        """Put the directory in its place; gives where that lies now which was there."""
        if not self.path.exists():
            self.directory.rename(self.path)
            return None
        if _exchanged(self.directory, self.path):
            return self.directory
        # Two steps: a process that is killed between them leaves it to ``recover`` to take the second.
        old = _beside(self.path, self._token, "replaced")
        self.path.rename(old)
        try:
            self.directory.rename(self.path)
        except OSError:
            old.rename(self.path)
            raise
        return old

    def _fill_place(self, replaced: Replaced) -> None:
        """Move the files into a place that has to stay."""
        with told(self.path, "what was there was being replaced: save again"):
            replaced.fill(self.marker)
        self._published = True
        self._release()
        _remove(self.directory)

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def recover(path: str | os.PathLike[str]) -> None:
    """Finish, or undo, a replacement of ``path`` in two steps that was killed between them.

    Only where a file system cannot exchange two directories is there such a moment. Raises OSError.
    """
    place = Path(os.path.realpath(expanded(path)))
    if place.exists() or not place.parent.is_dir():
        return
    for old in _leftovers(place, place.parent):
        if old.suffix == ".replaced":
            new = old.with_suffix(".saving")
            complete = any((new / marker).exists() for marker in MARKERS)
            (new if complete else old).rename(place)
            sync_directory(place.parent)
            return


def remove(path: Path) -> None:
    """Remove a directory, which is gone in one step; a kill on the way leaves what the next call removes.

    Raises OSError.
    """
    for leftover in path.parent.iterdir():
        if re.fullmatch(r"\..+\.[0-9a-f]{12}\.removed", leftover.name):
            _remove(leftover)
    gone = path.rename(_beside(path, uuid.uuid4().hex[:12], "removed"))
    shutil.rmtree(gone)


def _has_to_stay(path: Path) -> bool:
    """Whether no other directory can take the place: a mount point, or where this process works."""
    if path.is_mount():
        return True
    try:
        return Path.cwd().is_relative_to(path)
    except FileNotFoundError:  # the working directory was removed
        return False


def _beside(path: Path, token: str, kind: str) -> Path:
    return path.with_name(f".{path.name}.{token}.{kind}")


def _leftovers(path: Path, where: Path) -> list[Path]:
    """What saves to ``path`` that were killed have left in ``where``: all that no process has locked."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{12}}\.(saving|replaced)")
    found = [entry for entry in where.iterdir() if name.fullmatch(entry.name)]
    return sorted(entry for entry in found if _is_free(entry))


def _locked(directory: Path) -> int:
    """A handle of the directory, locked until it is closed, or this process ends."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a file system without locks: what is left is told by its name alone
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return handle


def _is_free(directory: Path) -> bool:
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    finally:
        os.close(handle)
    return True


def _remove(directory: Path) -> None:
    """Remove a directory. Nothing depends on it: what cannot be removed now, the next save removes."""
    shutil.rmtree(directory, ignore_errors=True)


def _exchanged(one: Path, other: Path) -> bool:
    """Let two directories change places in one step; False where that cannot be done here."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(other))


def _files_below(directory: Path) -> list[str]:
    """Files below a directory, by their names from there with slashes, in order."""
    found = []
    for folder, _, names in os.walk(directory):
        found += [(Path(folder) / name).relative_to(directory).as_posix() for name in names]
    return sorted(found)


@contextlib.contextmanager
def told(path: Path, state: str) -> Iterator[None]:
    """Raise an error of the system as a WriteError, with what it means for the place."""
    try:
        yield
    except ZerostartError:
        raise
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise WriteError(f"{path}: saving failed{where}: {error.strerror or error}; {state}") from error
