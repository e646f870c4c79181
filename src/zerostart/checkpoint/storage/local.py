"""Files of a file system that every rank's machine has, itself or over a network."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable
from pathlib import Path

from zerostart.checkpoint.storage.base import Residency, Storage
from zerostart.checkpoint.storage.files import FileState
from zerostart.checkpoint.storage.page_cache import NETWORK, direct_reads_suit, file_system, resident_share
from zerostart.checkpoint.storage.reader import FileReader

__all__ = ["LocalFiles"]

#: Files whose residency is looked at, and the share of bytes in the page cache up to which reads may go
#: round it.
SAMPLED_FILES, MOSTLY_ABSENT = 4, 0.1


class LocalFiles(Storage):
    """``files`` are absolute paths."""

    @classmethod
    def of(cls, paths: Iterable[str | os.PathLike[str]]) -> LocalFiles:
        """The files at ``paths``, as long as they are now. Raises OSError if one is not there."""
        found = tuple(os.fspath(path) for path in paths)
        return cls(found, tuple(Path(path).stat().st_size for path in found))

    @property
    def name(self) -> str:
        """The user's path says it."""
        return ""

    def reader(self, *, cold: bool = False, direct: bool = False) -> FileReader:
        """A reader of the files, through the page cache or round it."""
        return FileReader(self.files, self.sizes, cold, direct)

    def residency(self) -> Residency:
        """The file system of the first file, and how much of a few lies in the page cache."""
        sampled = self.files[:: max(1, len(self.files) // SAMPLED_FILES)][:SAMPLED_FILES]
        if not sampled:
            return Residency()
        kind, resident = file_system(sampled[0]), resident_share(sampled)
        direct = resident < MOSTLY_ABSENT and direct_reads_suit(kind)
        return Residency(kind, resident, remote=kind in NETWORK, direct=direct)

    def identity(self, file: int) -> Hashable:
        """Its size, time of modification and inode."""
        return FileState.at(self.files[file])

    def changed(self, before: Hashable, now: Hashable) -> str:
        """In words, what became of a file."""
        assert isinstance(before, FileState), "the identity of a file is its state"
        return before.changed_to(now if isinstance(now, FileState) else None)
