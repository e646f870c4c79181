"""The suite of tests that every storage has to pass.

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

import zerostart
from zerostart.checkpoint.source import open_catalog
from zerostart.checkpoint.storage import Reader, Rows, Storage
from zerostart.errors import CheckpointNotFoundError, ReadError
from zerostart.testing.ranks import Net, loaded_from, on_ranks, save

NAME = "model.safetensors"


class StorageConformance(ABC):
    """Tests of a storage: subclass it, and implement ``served``, which serves a folder by a URL."""

    #: What the ranks import first, so that the storage is registered there.
    imports: ClassVar[tuple[str, ...]] = ()
    #: Numbers of ranks of real loads, and their engine.
    worlds: ClassVar[tuple[int, ...]] = (2,)
    engine: ClassVar[str] = "fsdp2"

    @abstractmethod
    def served(self, folder: Path) -> AbstractContextManager[Callable[[str], str]]:
        """Context manager in which the storage serves the files of ``folder`` as they are at each moment.

        Gives a function from a file's name to its URL, or its path. Ranks of this machine have to reach it.
        """

    def follow(self, folder: Path) -> None:
        """Called after a file of ``folder`` was changed: a storage that does not see that gets it anew."""
        return

    @pytest.fixture
    def source(self, tmp_path: Path) -> Iterator[str]:
        """The URL of a checkpoint."""
        save(tmp_path / NAME)
        with self.served(tmp_path) as url:
            yield url(NAME)

    def _storage(self, source: str) -> Storage:
        return open_catalog(source).storage

    def test_sizes_and_names(self, source: str, tmp_path: Path) -> None:
        """Expect one file, of the right size, whose name contains that of the local file."""
        storage = self._storage(source)
        assert storage.sizes == ((tmp_path / NAME).stat().st_size,)
        assert NAME in storage.files[0]
        found = storage.residency()
        assert found.resident is None or 0 <= found.resident <= 1

    def test_headers_say_the_same_as_those_of_the_file(self, source: str, tmp_path: Path) -> None:
        """Expect the tensors' places in the storage to be those in the local file."""
        assert open_catalog(source).tensors == open_catalog(tmp_path / NAME).tensors

    def test_it_travels(self, source: str, tmp_path: Path) -> None:
        """Pickle the storage for another process; expect that it reads there."""
        storage: Storage = pickle.loads(pickle.dumps(self._storage(source)))
        assert storage == self._storage(source)
        with storage.reader() as reader:
            assert _range(reader, 3, 9) == (tmp_path / NAME).read_bytes()[3:12]

    @pytest.mark.parametrize("cold", [False, True])
    def test_ranges(self, source: str, tmp_path: Path, cold: bool) -> None:
        """Read ranges into several buffers, up to the end of the file; expect the file's bytes."""
        content = (tmp_path / NAME).read_bytes()
        with self._storage(source).reader(cold=cold, direct=cold) as reader:
            for offset, length in ((0, len(content)), (0, 1), (7, 100), (len(content) - 5, 5)):
                assert _range(reader, offset, length) == content[offset : offset + length]
            parts = [bytearray(size) for size in (3, 1, 60)]
            reader.read(0, 11, [memoryview(part) for part in parts])
            assert b"".join(parts) == content[11:75]

    def test_rows(self, source: str, tmp_path: Path) -> None:
        """Gather runs of bytes at equal distances, with and without ``announce``; expect the file's bytes."""
        content = (tmp_path / NAME).read_bytes()
        target = bytearray(b"-" * 50)
        with self._storage(source).reader() as reader:
            rows = Rows(5, 4, 13)
            reader.announce(0, 20, rows)
            reader.gather(0, 20, rows, memoryview(target), 10)
        for row in range(5):
            assert target[row * 10 : row * 10 + 4] == content[20 + row * 13 : 24 + row * 13]
            # Nothing is written between the runs.
            assert target[row * 10 + 4 : row * 10 + 10] == b"-" * 6

    def test_threads_share_a_reader(self, source: str, tmp_path: Path) -> None:
        """Read many ranges from several threads with one reader; expect the file's bytes."""
        content, choice = (tmp_path / NAME).read_bytes(), random.Random(5)
        spans = [(choice.randrange(len(content) - 300), choice.randrange(1, 300)) for _ in range(200)]
        with self._storage(source).reader() as reader, ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda span: _range(reader, *span), spans))
        assert found == [content[offset : offset + length] for offset, length in spans]

    def test_the_end_is_told(self, source: str, tmp_path: Path) -> None:
        """Read past the end; expect an error that names the file."""
        size = (tmp_path / NAME).stat().st_size
        with self._storage(source).reader() as reader:
            for offset in (size - 3, size + 10):
                with pytest.raises(ReadError, match=NAME):
                    _range(reader, offset, 8)

    def test_what_is_not_there_is_told(self, source: str) -> None:
        """Open a URL that leads nowhere; expect an error that names it."""
        with pytest.raises(CheckpointNotFoundError, match="absent"):
            open_catalog(source.replace(NAME, "absent.safetensors"))

    @pytest.mark.parametrize("how", ["shorter", "longer", "other bytes", "removed"])
    def test_a_file_that_changes_after_it_was_opened_is_told(
        self, source: str, tmp_path: Path, how: str
    ) -> None:
        """Change a file after its header was read, and after a load; expect an error."""
        storage = self._storage(source)
        # What a load leaves behind, for fp32 masters and offloaded layers: no file is open, and it knows what
        # it was.
        kept = storage.kept([0])
        assert kept.identities[0] == storage.identity(0) is not None
        assert kept.recalled("which a test wants").sizes == storage.sizes
        _change(tmp_path / NAME, how)
        self.follow(tmp_path)
        assert kept.identities[0] != storage.identity(0)
        with pytest.raises(ReadError, match=rf"{NAME}.*which a test wants"):
            kept.recalled("which a test wants")
        with pytest.raises((ReadError, CheckpointNotFoundError), match=NAME), storage.reader() as reader:
            _range(reader, 0, 16)

    def test_loads_hold_what_the_file_holds(self, source: str) -> None:
        """Load on real ranks; expect the weights of the file, and the planned bytes."""
        for world_size in self.worlds:
            plan = zerostart.plan(source, world_size, self.engine, model=Net)
            found = on_ranks(loaded_from, world_size, self.imports, source, self.engine)
            for rank, (wrong, read) in enumerate(found):
                assert wrong == [], f"rank {rank} of {world_size}"
                assert read == plan.ranks[rank].read_bytes


def _range(reader: Reader, offset: int, length: int) -> bytes:
    buffer = bytearray(length)
    reader.read(0, offset, [memoryview(buffer)])
    return bytes(buffer)


def _change(path: Path, how: str) -> None:
    content, before = path.read_bytes(), path.stat().st_mtime_ns
    if how == "removed":
        path.unlink()
        return
    new = {"shorter": content[:-1], "longer": content + b"x", "other bytes": bytes(len(content))}[how]
    path.write_bytes(new)
    # A second later, since a clock of a file system may not tell two writes in a row apart.
    os.utime(path, ns=(before + 10**9, before + 10**9))
