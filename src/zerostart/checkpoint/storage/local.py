"""Files of a file system that all machines of the job can read."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from zerostart.checkpoint.storage.base import Reader, Residency, Storage
from zerostart.checkpoint.storage.files import FileState
from zerostart.checkpoint.storage.page_cache import NETWORK, direct_suits, file_system, resident_share

#: Number of files whose residency is sampled, and the share of cached bytes up to which reads may bypass the
#: page cache.
SAMPLED_FILES, MOSTLY_ABSENT = 4, 0.1


@dataclass(frozen=True)
class LocalFiles(Storage):
    """Local files with absolute paths.

    ``identities`` are their states when they were opened.
    """

    @classmethod
    def known(cls, paths: Iterable[str], states: Sequence[FileState]) -> LocalFiles:
        """Create the storage of ``paths`` with their ``states``."""
        return cls(tuple(paths), tuple(state.size for state in states), tuple(states))

    @property
    def states(self) -> tuple[FileState | None, ...]:
        """Expected state of each file; None if unknown."""
        return tuple(state if isinstance(state, FileState) else None for state in self.identities)

    def reader(self, *, cold: bool = False, direct: bool = False) -> Reader:
        from zerostart.checkpoint.storage.reader import (
            FileReader,  # imports numpy, which a catalog does not need
        )

        return FileReader(self.files, self.sizes, cold, direct, self.states)

    def residency(self) -> Residency:
        sampled = self.files[:: max(1, len(self.files) // SAMPLED_FILES)][:SAMPLED_FILES]
        if not sampled:
            return Residency()
        kind, resident = file_system(sampled[0]), resident_share(sampled)
        direct = resident < MOSTLY_ABSENT and direct_suits(kind)
        return Residency(kind, resident, remote=kind in NETWORK, direct=direct)

    def identity(self, file: int) -> Hashable:
        return FileState.at(self.files[file])

    def changed(self, before: Hashable, now: Hashable) -> str:
        assert isinstance(before, FileState), "the identity of a file is its state"
        return before.changed_to(now if isinstance(now, FileState) else None)
