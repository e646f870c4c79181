"""Uploads to stores that take an object whole, from one process, and give it other names afterwards.

Such a store knows no parts, no marks and no conditions. So an object is put together on the disk of the rank
that uploads it, and what is replaced is looked at right before. A request that breaks off may leave a part
of an object: so what a save makes it makes aside, in the folder that it has to itself, and moves it into its
place, which the store does by itself. How whole a name is while something is moved there is the store's.
"""

from __future__ import annotations

import mmap
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import BinaryIO, Self

from zerostart.checkpoint.manifest import HIDDEN
from zerostart.checkpoint.storage.uploads import ANYTHING, Anything, Before, Stored, TakenError, Uploads
from zerostart.errors import WriteError

#: Seconds before each further look at what is not as it should be.
LOOKS = (0.1, 0.3, 1.0)


@dataclass(frozen=True)
class StagedUploads(Uploads):
    """See ``Uploads``; a kind of store says how it does five things."""

    #: Where objects are made before they are moved into their places; empty for there.
    own: str = field(default="", kw_only=True)

    staged = True

    @abstractmethod
    def found(self, name: str) -> Stored | None:
        """The object of a name, which has the same tag in every list; None where there is none."""

    @abstractmethod
    def send(self, name: str, data: bytes | memoryview) -> None:
        """Upload an object whole, in the place of what is there, with the folders above it."""

    @abstractmethod
    def move(self, name: str, to: str) -> None:
        """Give an object another name, in the place of what is there; an answer that was lost is no error."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove an object. Raises FileNotFoundError where there is none."""

    @abstractmethod
    def delete_folder(self, folder: str) -> None:
        """Remove a folder that has no objects, as far as the store has any, and can without others' harm."""

    def aside(self, folder: str) -> Self:
        """See ``Uploads``."""
        return replace(self, own=folder)

    def at(self, url: str) -> Self:
        """See ``Uploads``."""
        return replace(self, url=url.rstrip("/"), own="")

    def put(self, name: str, data: bytes, before: Before = ANYTHING) -> str:
        """See ``Uploads``."""
        self._check(name, before)
        self._make(name, data)
        return self._made(name, len(data)).tag

    def put_file(self, name: str, file: BinaryIO) -> None:
        """See ``Uploads``: its pages are the kernel's, which takes them back when it needs memory."""
        size = file.seek(0, 2)
        if not size:
            self._make(name, b"")
        else:
            # Not closed here: the library lets go of it when the request has ended.
            pages = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
            self._make(name, memoryview(pages))
        self._made(name, size)

    def give_name(self, name: str, to: str, before: Before = ANYTHING) -> None:
        """See ``Uploads``."""
        self._check(to, before)
        if (there := self.seen(name, lambda found: found is not None)) is None:
            raise WriteError(f"{self.url}/{name}: was removed by somebody else")
        self._move(name, to)
        self._made(to, there.size)

    def remove(self, names: Collection[str]) -> None:
        """See ``Uploads``; and folders that have nothing any more."""
        for name in names:
            # The folder that a save has had to itself is called as its note is, by which it is found: first.
            if name.startswith(f"{HIDDEN}/") and name.endswith(".json"):
                self.delete_folder(name.removesuffix(".json"))
            try:
                self.delete(name)
            except FileNotFoundError:
                continue
        # The deepest first, so that those above have nothing any more either.
        folders = {str(folder) for name in names for folder in PurePosixPath(name).parents} - {"."}
        for folder in sorted(folders, key=lambda one: one.count("/"), reverse=True):
            self.delete_folder(folder)

    def seen(self, name: str, expected: Callable[[Stored | None], bool]) -> Stored | None:
        """``found``, asked again where what has to be there is not, or is not as ``expected``.

        rclone's servers leave names out of a list while something else in the folder is moved: of absence
        this is no proof.
        """
        for delay in LOOKS:
            if expected(there := self.found(name)):
                return there
            time.sleep(delay)
        return self.found(name)

    def _check(self, name: str, before: Before) -> None:
        if isinstance(before, Anything):
            return
        # Looked at once where nothing is to be there: a second look could only miss what is.
        there = self.seen(name, lambda found: before is None or (found is not None and found.tag == before))
        if (None if there is None else there.tag) != before:
            raise TakenError(f"{self.url}/{name}: was {'removed' if there is None else 'replaced'} meanwhile")

    def _make(self, name: str, data: bytes | memoryview) -> None:
        if not self.own:
            self.send(name, data)
            return
        part = f"{self.own}/{uuid.uuid4().hex}.part"
        self.send(part, data)
        self._move(part, name)

    def _move(self, name: str, to: str) -> None:
        """``move``, looked at: some stores answer that it is done, and keep what is at the new name."""
        self.move(name, to)
        if self.found(name) is not None:
            raise WriteError(
                f"moving {self.url}/{to} into its place failed: the store said that it is there, and it lies "
                "where it was uploaded to; saves need a store that moves files in the place of others"
            )

    def _made(self, name: str, size: int) -> Stored:
        """What a request has made. Raises WriteError where it has made something else."""
        there = self.seen(name, lambda found: found is not None and found.size == size)
        if there is None or there.size != size:
            has = "is not there" if there is None else f"has {there.size} of {size} bytes"
            raise WriteError(
                f"uploading {self.url}/{name} failed: the store said that it is there, and it {has}"
            )
        return there
