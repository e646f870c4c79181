"""Saves into a directory that others may use, too: new files beside old ones, and one step to them.

Everything is written into ``.zerostart/TOKEN`` in the directory itself, and brought to the disk. Then weights
get names that nothing has, and one step makes readers go by them (the switch): the rename of the index, of
the single file of weights, or of the document that names them; where an index takes over from a single file,
the removal of that. Then what belongs beside them gets its names, and the old weights go. Nothing else is
touched.

``.zerostart/TOKEN.lock`` is locked by the save that has written it. It lists what gets and what loses its
name, which are told by inode, length and time. So whoever saves next, here or beside, finishes what a killed
save has left once that has made its switch, and takes it back before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import socket
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from zerostart.checkpoint.manifest import (
    FORMAT,
    HIDDEN,
    MARKER,
    SAVED_AT,
    contents_of,
    current,
    grouped,
    is_foreign,
)
from zerostart.checkpoint.paths import expanded
from zerostart.checkpoint.strict_json import JsonObject
from zerostart.checkpoint.write.folders import Folder, lock, sync, sync_handle, write_whole
from zerostart.checkpoint.write.switching import Plan, clean_up, clear_killed, finish, planned, switch
from zerostart.errors import WriteError, ZerostartError


class Staging:
    """A save into the directory ``path``; one process has it, and writes or leads those who do.

    Everything is written below ``directory``. Then :meth:`complete` gives it its names, or :meth:`discard`
    removes it, which may be called at any time, and more than once.
    """

    def __init__(
        self, path: str | os.PathLike[str], marker: str = MARKER, by_document: bool | None = None
    ) -> None:
        """Make the directories, after removing what killed processes have left. Raises WriteError.

        ``marker`` is the name of the document, empty for none. ``by_document``: readers go by it, and not by
        the names of weights; None: by the one of a training state.
        """
        # A link that leads to a directory goes on doing so.
        # Resolved once: all that follows, clean-ups included, is done to one directory.
        self.path = Path(os.path.realpath(expanded(path)))
        self._marker, self._by_document = (
            marker,
            marker not in (MARKER, "") if by_document is None else by_document,
        )
        self._token = uuid.uuid4().hex[:12]
        self.directory = self.path / HIDDEN / self._token
        self._staged = f"{HIDDEN}/{self._token}/"
        self._made: list[Path] = []
        self._plan: Plan | None = None
        self._folder: Folder | None = None
        self._lock = -1
        try:
            with write_errors(self.path, "nothing was saved"):
                if self.path.exists() and not self.path.is_dir():
                    raise WriteError(f"{self.path} is a file; save to a directory, or remove it")
                if marker and is_foreign(self.path / marker):
                    raise WriteError(
                        f"{self.path / marker} was not written by zerostart, and this save would replace it: "
                        "rename it, or save to another directory"
                    )
                clear_killed(self.path)
                self._begin()
        # Also at an interrupt: the lock must not outlive a save that has never begun.
        except BaseException:
            self.discard()
            raise

    def _begin(self) -> None:
        # Again, where somebody who cleans up has removed the directory or the lock between two of these
        # steps.
        while self._folder is None:
            self._make_place()
            with contextlib.suppress(FileNotFoundError):  # removed, as what a killed save has left
                self._folder = Folder(self.path)
                self._folder.make(HIDDEN)
                self._lock = _locked(self._folder, self._token, bool(self._made))
            if self._lock < 0 and self._folder is not None:
                self._folder.close()
                self._folder = None
        self._folder.make(self._staged)

    def _make_place(self) -> None:
        missing = [place for place in (self.path, *self.path.parents) if not place.exists()]
        for place in reversed(missing):
            with contextlib.suppress(FileExistsError):
                place.mkdir()
                self._made.append(place)
                sync(place.parent, os.O_DIRECTORY)

    def complete(self, document: JsonObject) -> dict[str, str]:
        """Bring everything to the disk, give it its names, and have readers go by it.

        The document holds ``document``, and "files": for each file its "bytes" and, unless "digests" of
        ``document`` has the tensors of its folder, its "sha256"; what "files" of ``document`` says of a file
        is taken as it is, and may be of one that stays where it is. Gives the names of weights, by those that
        they were written under. Raises WriteError (of an OSError); the place is then as it was, unless the
        message says otherwise.
        """
        assert self._folder is not None, "not yet discarded"
        document = {SAVED_AT: time.time_ns(), **document} if self._marker == MARKER else document
        state, names = "nothing was saved, and what was there is as it was", dict[str, str]()
        with write_errors(self.path, state):
            known = document.get("files", {})
            below = _files_below(self.directory)
            # Whoever wrote them (other ranks too): bytes are on the disk before anything names them.
            for name in below:
                sync(self.directory / name)
            files = {name: known.get(name) or self._described(name, document) for name in below}
            files = {**known, **files}
            contents = {"": list(files)} if self._by_document else grouped(files, staged=True)
        with contextlib.ExitStack() as stack:
            with write_errors(self.path, state):
                # From the plan to the last name: two saves that plan at once would give out the same free
                # names.
                stack.enter_context(self._folder.alone())
            # One switch for each content (a model, an adapter beside it): readers of one never wait for the
            # other.
            for key, of in contents.items():
                described = {**document, "format": FORMAT, "files": {name: files[name] for name in of}}
                if not self._by_document and "digests" in document:
                    folders = {str(Path(name).parent) for name in of if name.endswith(".safetensors")}
                    described["digests"] = {f: d for f, d in document["digests"].items() if f in folders}
                names |= self._publish(key, described, state)
                state = "a part of it was saved: save again"
        with contextlib.suppress(OSError):  # what is left is nobody's, and goes with the next save
            self._close()
        return names

    def _publish(self, key: str, document: dict[str, object], state: str) -> dict[str, str]:
        folder = self._folder
        assert folder is not None, "not yet discarded"
        with write_errors(self.path, state):
            plan = planned(folder, self._token, self._marker, self._by_document, key, document)
            plan.folders = _above([*plan.puts.values(), *plan.deliver, plan.switch])
            plan.folders = [name for name in plan.folders if folder.identity(name) is None]
            # On the disk before the first name changes: a kill after this leaves a plan to finish or to take
            # back.
            _note(self._lock, dataclasses.asdict(plan))
            self._plan = plan
            if self._marker:  # once it is noted of what: that of another content is given its name at a kill
                data = (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode()
                write_whole(self.directory / self._marker, data, self.directory / f".{self._marker}.part")
            for name in plan.folders:
                folder.make(name)
            switch(folder, self._staged, plan)
        with write_errors(self.path, "all is there, but may be lost if the machine stops now: save again"):
            finish(folder, self._staged, plan)
        self._plan = None
        return plan.puts

    def discard(self) -> None:
        """Remove what was written and has no names yet; what has made its switch is finished."""
        with contextlib.suppress(OSError, ZerostartError):
            self._close()
        for place in reversed(self._made):  # those that have nothing in them
            with contextlib.suppress(OSError):
                place.rmdir()

    def _close(self) -> None:
        # Taken out first, so that a second call finds nothing to do, whatever fails in this one.
        folder, self._folder = self._folder, None
        handle, self._lock = self._lock, -1
        if folder is not None:
            try:
                if handle >= 0:
                    clean_up(folder, self._token, handle, self._plan)
            finally:
                if handle >= 0:
                    os.close(handle)
                folder.remove_empty(HIDDEN)
                folder.close()

    def _described(self, name: str, document: JsonObject) -> JsonObject:
        """What tells a file that it is as it was: its length, and a hash unless its tensors have digests."""
        file = self.directory / name
        described: JsonObject = {"bytes": file.stat().st_size}
        weights = file.suffix == ".safetensors"
        if not weights or (self._marker and str(Path(name).parent) not in document.get("digests", {})):
            with file.open("rb") as handle:
                described["sha256"] = hashlib.file_digest(handle, "sha256").hexdigest()
        return described


def remove(path: Path, marker: str) -> None:
    """Remove the files that the document ``marker`` of a directory names, and it where nothing else is in it.

    It is none any more from the first step on; what a kill leaves goes with the next save
    beside it. Raises OSError and ZerostartError.
    """
    folder = Folder(path)
    try:
        with folder.alone():
            document = current(path, marker)
            if document is None:
                return
            token = uuid.uuid4().hex[:12]
            folder.make(HIDDEN)
            handle = _locked(folder, token, True)
            # No switch of its own: removing the document is the step from which on nothing of it counts.
            plan = Plan(marker, "")
            contents = contents_of(document).values() if marker == MARKER else [document]
            names = {name for content in contents for name in content["files"]}
            for name in sorted(names):
                if (known := folder.identity(name, regular=True)) is not None:
                    plan.drop[name] = known
            plan.folders = _above(names)
            try:
                _note(handle, dataclasses.asdict(plan))
                folder.remove(marker)
                folder.sync(marker)
                clean_up(folder, token, handle, plan)
            finally:
                os.close(handle)
    finally:
        folder.close()
    with contextlib.suppress(OSError):  # others have put something there
        path.rmdir()


def _locked(folder: Folder, token: str, new: bool) -> int:
    """The handle of a new lock. Raises FileNotFoundError where somebody took it for one that was left."""
    name = f"{HIDDEN}/{token}.lock"
    with folder.parent(name) as (parent, last):
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        handle = os.open(last, flags, 0o666, dir_fd=parent)
        try:
            # Between making the file and locking it somebody may have taken it for a left one, and have
            # removed it: then the name has another inode, or none.
            mine = lock(handle)
            found = os.stat(last, dir_fd=parent, follow_symlinks=False)
            if mine is False or found.st_ino != os.fstat(handle).st_ino:
                raise FileNotFoundError(name)
            by = {"host": socket.gethostname(), "pid": os.getpid(), "inode": found.st_ino}
            _note(handle, {**by, "new": new})
            sync_handle(parent)
        except BaseException:
            os.close(handle)
            with contextlib.suppress(OSError):
                os.unlink(last, dir_fd=parent)
            raise
    return handle


def _note(handle: int, line: Mapping[str, object]) -> None:
    left = memoryview((json.dumps(line) + "\n").encode())
    while left:
        left = left[os.write(handle, left) :]
    os.fsync(handle)


def _above(names: Iterable[str]) -> list[str]:
    """All directories that files are in, those above first."""
    return sorted({parent.as_posix() for name in names for parent in Path(name).parents} - {"."})


def _files_below(directory: Path) -> list[str]:
    """Files below a directory, by their names from there with slashes, in order."""
    found = []
    for folder, _, names in os.walk(directory):
        found += [(Path(folder) / name).relative_to(directory).as_posix() for name in names]
    return sorted(found)


@contextlib.contextmanager
def write_errors(path: Path | str, state: str) -> Iterator[None]:
    """Raise an error of the system as a WriteError, with what it means for the place."""
    try:
        yield
    except ZerostartError:
        raise
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise WriteError(f"{path}: saving failed{where}: {error.strerror or error}; {state}") from error
