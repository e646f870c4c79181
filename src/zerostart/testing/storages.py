"""Conformance suite for storages.

class TestMine(StorageConformance):
    imports = ("my_package.my_storage",)

    @contextmanager
    def served(self, folder):
        with my_server(folder) as address:
            yield lambda name: f"mine://{address}/{name}"
"""

from __future__ import annotations

import os
import pickle
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar

import pytest

from zerostart.checkpoint.source import open_catalog
from zerostart.checkpoint.storage import Reader, Rows, Storage
from zerostart.errors import CheckpointNotFoundError, ReadError
from zerostart.testing.ranks import check_loads, save

NAME = "model.safetensors"


class StorageConformance(ABC):
    """Tests of a storage; a subclass implements ``served``."""

    #: Modules that register the storage; the ranks import them first.
    imports: ClassVar[tuple[str, ...]] = ()
    #: World sizes and engine of the real loads.
    worlds: ClassVar[tuple[int, ...]] = (2,)
    engine: ClassVar[str] = "fsdp2"

    @abstractmethod
    def served(self, folder: Path) -> AbstractContextManager[Callable[[str], str]]:
        """Serve the present files of ``folder`` from the storage, in a context manager.

        Its value is a function from a file's name to its URL or path, which ranks of this machine can reach.
        """

    def follow(self, folder: Path) -> None:
        """Update the storage after a change in ``folder``; do nothing if it sees changes."""
        return

    @pytest.fixture
    def source(self, tmp_path: Path) -> Iterator[str]:
        """URL of a checkpoint."""
        save(tmp_path / NAME)
        with self.served(tmp_path) as url:
            yield url(NAME)

    def _storage(self, source: str) -> Storage:
        return open_catalog(source).storage

    def test_sizes_and_names(self, source: str, tmp_path: Path) -> None:
        """Expect one file with the size and name of the local file."""
        storage = self._storage(source)
        assert storage.sizes == ((tmp_path / NAME).stat().st_size,)
        assert NAME in storage.files[0]
        resident = storage.residency().resident
        assert resident is None or 0 <= resident <= 1

    def test_it_travels(self, source: str, tmp_path: Path) -> None:
        """Pickle the storage; expect that the copy reads."""
        storage: Storage = pickle.loads(pickle.dumps(self._storage(source)))
        assert storage == self._storage(source)
        with storage.reader() as reader:
            assert _read_range(reader, 3, 9) == (tmp_path / NAME).read_bytes()[3:12]

    @pytest.mark.parametrize("cold", [False, True])
    def test_ranges(self, source: str, tmp_path: Path, cold: bool) -> None:
        """Read ranges up to the end into several buffers; expect the file's bytes."""
        content = (tmp_path / NAME).read_bytes()
        with self._storage(source).reader(cold=cold, direct=cold) as reader:
            for offset, length in ((0, len(content)), (0, 1), (7, 100), (len(content) - 5, 5)):
                assert _read_range(reader, offset, length) == content[offset : offset + length]
            parts = [bytearray(size) for size in (3, 1, 60)]
            reader.read(0, 11, [memoryview(part) for part in parts])
            assert b"".join(parts) == content[11:75]

    def test_rows(self, source: str, tmp_path: Path) -> None:
        """Gather runs of bytes at equal distances; expect the file's bytes."""
        content = (tmp_path / NAME).read_bytes()
        target = bytearray(b"-" * 50)
        with self._storage(source).reader() as reader:
            rows = Rows(5, 4, 13)
            reader.announce(0, 20, rows)
            reader.gather(0, 20, rows, memoryview(target), 10)
        for row in range(5):
            assert target[row * 10 : row * 10 + 4] == content[20 + row * 13 : 24 + row * 13]
            # The bytes between the runs are unchanged.
            assert target[row * 10 + 4 : row * 10 + 10] == b"-" * 6

    def test_threads_share_a_reader(self, source: str, tmp_path: Path) -> None:
        """Read many ranges from several threads with one reader; expect the file's bytes."""
        content, choice = (tmp_path / NAME).read_bytes(), random.Random(5)
        spans = [(choice.randrange(len(content) - 300), choice.randrange(1, 300)) for _ in range(200)]
        with self._storage(source).reader() as reader, ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda span: _read_range(reader, *span), spans))
        assert results == [content[offset : offset + length] for offset, length in spans]

    def test_the_end_is_told(self, source: str, tmp_path: Path) -> None:
        """Read past the end; expect an error that names the file."""
        size = (tmp_path / NAME).stat().st_size
        with self._storage(source).reader() as reader:
            for offset in (size - 3, size + 10):
                with pytest.raises(ReadError, match=NAME):
                    _read_range(reader, offset, 8)

    def test_what_is_not_there_is_told(self, source: str) -> None:
        """Open a URL that leads nowhere; expect an error that names it."""
        with pytest.raises(CheckpointNotFoundError, match="absent"):
            open_catalog(source.replace(NAME, "absent.safetensors"))

    @pytest.mark.parametrize("how", ["shorter", "longer", "other bytes", "removed"])
    def test_a_file_that_changes_after_it_was_opened_is_told(
        self, source: str, tmp_path: Path, how: str
    ) -> None:
        """Change a file after its header was read; expect an error."""
        storage = self._storage(source)
        # A load keeps such a record of its files for fp32 masters and offloaded layers.
        record = storage.detach([0])
        assert record.identities[0] == storage.identity(0) is not None
        assert record.reattach("which a test wants").sizes == storage.sizes
        _change_file(tmp_path / NAME, how)
        self.follow(tmp_path)
        assert record.identities[0] != storage.identity(0)
        with pytest.raises(ReadError, match=rf"{NAME}.*which a test wants"):
            record.reattach("which a test wants")
        with pytest.raises((ReadError, CheckpointNotFoundError), match=NAME), storage.reader() as reader:
            _read_range(reader, 0, 16)

    def test_loads_hold_what_the_file_holds(self, source: str) -> None:
        """Load on real ranks; expect the weights of the file, and the planned bytes."""
        check_loads(self.worlds, self.imports, source, self.engine)


def _read_range(reader: Reader, offset: int, length: int) -> bytes:
    buffer = bytearray(length)
    reader.read(0, offset, [memoryview(buffer)])
    return bytes(buffer)


def _change_file(path: Path, how: str) -> None:
    content, before = path.read_bytes(), path.stat().st_mtime_ns
    if how == "removed":
        path.unlink()
        return
    new = {"shorter": content[:-1], "longer": content + b"x", "other bytes": bytes(len(content))}[how]
    path.write_bytes(new)
    # One second later, since file systems may have coarse clocks.
    os.utime(path, ns=(before + 10**9, before + 10**9))
