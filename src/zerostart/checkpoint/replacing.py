"""What stays when a directory takes the place of another: the files that others have put there."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from zerostart.checkpoint.durable import sync_directory
from zerostart.checkpoint.strict_json import read_json
from zerostart.errors import WriteError, ZerostartError

__all__ = ["MARKER", "MARKERS", "Replaced", "is_inside"]

#: The file that makes a directory valid, unless another is named.
MARKER = "zerostart.json"
#: All names of such files: a save replaces what an earlier one of another kind has left in its place, too.
MARKERS = (MARKER, "state.json")
_SHARD = re.compile(r"(?P<stem>.+?)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def is_inside(name: object) -> bool:
    """Whether a name in a marker, which anybody may have written, is one of a file below its directory."""
    return (
        isinstance(name, str)
        and not name.startswith("/")
        and ".." not in PurePosixPath(name).parts
        and "\0" not in name
    )


class Replaced:
    """What lies at a place that is to be replaced, and of it what is kept: files that others have put there.

    Not kept are the files that a marker there lists, and weights of a name that is saved anew.
    """

    def __init__(self, old: Path, new: Path, files: Mapping[str, Any]) -> None:
        self._old, self._new, self._place = old, new, old
        self._dropped = set(MARKERS)
        self._files = list(files)
        self._stems = {(str(Path(name).parent), stem) for name in files if (stem := _stem(name))}
        for marker in MARKERS:
            with contextlib.suppress(ZerostartError):  # none, or not one of ours
                listed = read_json(old / marker, "marker").get("files")
                self._dropped |= {name for name in listed or () if is_inside(name)}

    def keep(self, moved: Path | None = None) -> None:
        """Give files of the old directory (``moved``, once it was replaced) a name in the new one, too.

        They are not copied: each is one file with two names, until the old directory goes. Raises WriteError
        where a file system cannot do that.
        """
        old, new = (self._old, self._new) if moved is None else (moved, self._place)
        if old.is_dir():
            self._keep_in(old, new, "")

    def fill(self, marker: str) -> None:
        """Move the new files into the old directory, which stays, and ``marker`` last.

        Before the first, markers and indices there go, so that a mixture of two checkpoints looks like none.
        Raises OSError.
        """
        names = sorted(self._files, key=lambda name: (name.endswith(".index.json"), name))
        for name in MARKERS:
            (self._place / name).unlink(missing_ok=True)
        sync_directory(self._place)
        for name in sorted({*self._dropped, *self._weights()}, key=lambda n: (not n.endswith(".json"), n)):
            with contextlib.suppress(IsADirectoryError, NotADirectoryError):
                (self._place / name).unlink(missing_ok=True)
        for name in names:
            target = self._place / name
            target.parent.mkdir(parents=True, exist_ok=True)
            (self._new / name).replace(target)
        for folder in {(self._place / name).parent for name in names}:
            sync_directory(folder)
        (self._new / marker).replace(self._place / marker)
        sync_directory(self._place)

    def _weights(self) -> Iterator[str]:
        """Weights in the place, and their indices, of names that are saved anew."""
        for folder, stem in self._stems:
            place = self._place / folder
            for entry in place.iterdir() if place.is_dir() else ():
                if _stem(entry.name) == stem:
                    yield (Path(folder) / entry.name).as_posix()

    def _keep_in(self, old: Path, new: Path, below: str) -> None:
        with os.scandir(old) as entries:
            for entry in entries:
                name = below + entry.name
                if entry.is_dir(follow_symlinks=False):
                    self._keep_directory(entry.path, new / entry.name, f"{name}/")
                elif name not in self._dropped and not self._is_saved_anew(name):
                    with contextlib.suppress(FileExistsError):
                        _link(entry.path, new / entry.name)

    def _keep_directory(self, old: str, new: Path, below: str) -> None:
        made = not new.exists()
        if made:
            new.mkdir()
        self._keep_in(Path(old), new, below)
        if made and any(name.startswith(below) for name in self._dropped):
            with contextlib.suppress(OSError):  # there is something of others in it
                new.rmdir()

    def _is_saved_anew(self, name: str) -> bool:
        stem = _stem(name)
        return bool(stem) and (str(Path(name).parent), stem) in self._stems


def _link(old: str, new: Path) -> None:
    try:
        os.link(old, new, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError as error:
        raise WriteError(
            f"{old} was not saved by zerostart and cannot be kept ({error.strerror}): save to a new "
            "directory, or move it away first"
        ) from error


def _stem(name: str) -> str:
    """What the file name of weights, or of their index, begins with; empty for other files."""
    found = _SHARD.fullmatch(Path(name).name)
    return found["stem"] if found else ""
