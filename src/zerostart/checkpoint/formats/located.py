"""Folders and files of a checkpoint that many have written, on this machine or in a store, by the same calls.

What is asked of a path is what ``pathlib`` calls it. In a store each folder is listed once, and of each file
blocks are fetched and kept that headers, directories of archives and pickles lie in: never a file as a whole.
"""

from __future__ import annotations

import copy
import fnmatch
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Protocol, Self

from zerostart.checkpoint.storage import Storage
from zerostart.errors import CheckpointError, CheckpointNotFoundError

#: Bytes of a block, and most blocks that are kept, of all files together, which are read one after the other:
#: a box of ``torch.distributed.checkpoint`` has its header and its directory at its ends, and boxes follow
#: each other.
BLOCK, KEPT = 64 << 10, 64


class Located(Protocol):
    """A file or folder, as ``pathlib.Path`` has it."""

    @property
    def name(self) -> str:
        """The last part of it."""
        ...

    @property
    def stem(self) -> str:
        """The same without what follows the last dot."""
        ...

    @property
    def parent(self) -> Self:
        """The folder that it lies in."""
        ...

    @property
    def parents(self) -> Sequence[Self]:
        """The folders that it lies in, the innermost first."""
        ...

    def __truediv__(self, name: str) -> Self: ...

    def is_file(self) -> bool:
        """Whether a file is there. Raises ReadError where a store does not answer."""
        ...

    def is_dir(self) -> bool:
        """Whether a folder is there. Raises ReadError where a store does not answer."""
        ...

    def iterdir(self) -> Iterator[Self]:
        """What lies right in the folder. Raises ReadError where a store does not answer."""
        ...

    def glob(self, pattern: str) -> Iterator[Self]:
        """What lies right in the folder and is called so. Raises ReadError where a store does not answer."""
        ...


class StoredFile:
    """One file of a store, by blocks, which it has from ``kept``: see ``HeaderBytes``."""

    def __init__(self, storage: Storage, kept: Blocks) -> None:
        self.storage, self.size = storage, storage.sizes[0]
        self._reader = storage.reader()
        self._kept = kept

    def let_go(self) -> None:
        """Keep nothing of what came with the opening: what is asked for from now on is fetched."""
        self.storage = copy.copy(self.storage)  # as it travels: see ``ObjectFiles.__getstate__``
        self._reader = self.storage.reader()

    def read(self, length: int, offset: int) -> bytes:
        """See ``HeaderBytes``."""
        end = min(offset + max(0, length), self.size)
        if offset >= end:
            return b""
        first, last = offset // BLOCK, (end - 1) // BLOCK
        if last - first >= KEPT // 2:  # a long pickle, which is asked for once
            return self._fetched(offset, end)
        data = b"".join(self._kept.block(self, number) for number in range(first, last + 1))
        return data[offset - first * BLOCK : end - first * BLOCK]

    def block(self, number: int) -> bytes:
        """Fetch a block."""
        return self._fetched(number * BLOCK, min((number + 1) * BLOCK, self.size))

    def _fetched(self, begin: int, end: int) -> bytes:
        buffer = bytearray(end - begin)
        self._reader.read(0, begin, [memoryview(buffer)])
        return bytes(buffer)


class Blocks:
    """Blocks of the files of one tree that were fetched last."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def block(self, file: StoredFile, number: int) -> bytes:
        """A block of a file. Raises ReadError where a store does not answer."""
        key = id(file), number  # which the tree keeps
        with self._lock:
            if key not in self._blocks:
                self._blocks[key] = file.block(number)
                if len(self._blocks) > KEPT:
                    self._blocks.popitem(last=False)
            self._blocks.move_to_end(key)
            return self._blocks[key]


class _Tree:
    """What lies below the folder of a storage, as it was when it was first asked for."""

    def __init__(self, top: Storage) -> None:
        self.top = top
        self._storages: dict[str, Storage | None] = {"": top}
        self._folders: dict[str, frozenset[str]] = {}
        self._files: dict[str, StoredFile] = {}
        self._kept = Blocks()

    def storage(self, folder: str) -> Storage | None:
        """The files right in a folder."""
        if folder not in self._storages:
            self._storages[folder] = self.top.within(folder)
        return self._storages[folder]

    def names(self, folder: str) -> frozenset[str]:
        """The names of files right in a folder."""
        storage = self.storage(folder)
        return frozenset(() if storage is None else storage.names())

    def folders(self, folder: str) -> frozenset[str]:
        """The names of folders right in a folder."""
        if folder not in self._folders:
            self._folders[folder] = frozenset(self.top.folders(folder))
        return self._folders[folder]

    def file(self, name: str) -> StoredFile:
        """A file, opened once."""
        if name not in self._files:
            self._files[name] = StoredFile(self.top.named([name]), self._kept)
        return self._files[name]


class StoredPath:
    """A file or folder in a store: see ``Located``."""

    def __init__(self, tree: _Tree, place: PurePosixPath) -> None:
        self._tree, self._place = tree, place

    @classmethod
    def of(cls, storage: Storage) -> StoredPath:
        """The folder of a storage."""
        return cls(_Tree(storage), PurePosixPath())

    @property
    def name(self) -> str:
        """See ``Located``."""
        return self._place.name or self._tree.top.folder.rpartition("/")[2]

    @property
    def stem(self) -> str:
        """See ``Located``."""
        return self._place.stem

    @property
    def parent(self) -> Self:
        """See ``Located``; of the first one itself."""
        return type(self)(self._tree, self._place.parent)

    @property
    def parents(self) -> Sequence[Self]:
        """See ``Located``, up to the first one."""
        return [type(self)(self._tree, place) for place in self._place.parents]

    def __truediv__(self, name: str) -> Self:
        return type(self)(self._tree, self._place / name)

    def __str__(self) -> str:
        return f"{self._tree.top.folder}/{self._key}".rstrip("/")

    @property
    def _key(self) -> str:
        return "" if self._place == PurePosixPath() else self._place.as_posix()

    def is_file(self) -> bool:
        """See ``Located``."""
        return bool(self._key) and self._place.name in self._tree.names(self.parent._key)

    def is_dir(self) -> bool:
        """See ``Located``."""
        return not self._key or self._place.name in self._tree.folders(self.parent._key)

    def iterdir(self) -> Iterator[Self]:
        """See ``Located``: files first."""
        for name in (*sorted(self._tree.names(self._key)), *sorted(self._tree.folders(self._key))):
            yield self / name

    def glob(self, pattern: str) -> Iterator[Self]:
        """See ``Located``."""
        return (one for one in self.iterdir() if fnmatch.fnmatchcase(one.name, pattern))

    def file(self) -> StoredFile:
        """Its bytes. Raises CheckpointNotFoundError where it is not there, ReadError."""
        if not self.is_file():
            raise CheckpointNotFoundError(f"{self}: there is no such file")
        return self._tree.file(self._key)

    def folder(self) -> Storage | None:
        """The files of the folder; None where there are none."""
        return self._tree.storage(self._key)

    def read_small(self, most: int = 4096) -> bytes:
        """What a short file holds. Raises CheckpointError for a longer one, and as ``file``."""
        file = self.file()
        if file.size > most:
            raise CheckpointError(
                f"{self}: its {file.size} bytes are beyond the limit of {most} for such a file"
            )
        return file.read(file.size, 0)
