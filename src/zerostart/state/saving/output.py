"""Where the ranks' bytes of a save go: into files of a directory that all see, or into objects of a store."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerostart.checkpoint.digest import ROOM
from zerostart.checkpoint.storage.direct import PAGE
from zerostart.checkpoint.strict_json import JsonObject
from zerostart.checkpoint.write.shards import SaveLayout
from zerostart.checkpoint.write.space import check_space
from zerostart.checkpoint.write.staging import Staging
from zerostart.checkpoint.write.store import StoreStaging
from zerostart.checkpoint.write.writer import CheckpointWriter
from zerostart.distributed.machine import cores, local_ranks
from zerostart.distributed.world import World
from zerostart.errors import ConfigError, WriteError
from zerostart.transfer.buffers import rounds_up
from zerostart.transfer.planning.writes import WritePlan
from zerostart.transfer.tuning import MIN_CHUNK
from zerostart.transfer.writing import SLACK, Noted, Source, write_out

MiB = 1 << 20
#: Bytes of one write, and of a thread's staging buffer, where no limit asks for less.
CHUNK = 8 * MiB
#: Most threads that write on one rank.
THREADS = 4


class Place(ABC):
    """A directory that is being saved to, as one rank has it: of files, or of objects.

    ``directory`` is where small files are written, by the first rank.
    """

    directory: Path
    #: What to call it.
    name: str
    #: On the first rank what is written, and has no names yet.
    staging: Staging | StoreStaging | None

    @abstractmethod
    def check_visible(self, world: World) -> None:
        """Raise WriteError where this rank does not reach what the first one has made."""

    @abstractmethod
    def check_room(self, nbytes: int, what: str) -> None:
        """Raise WriteError where so many bytes do not fit, as far as that can be told."""

    @abstractmethod
    def output(self, folder: str, layout: SaveLayout) -> Output:
        """What writes the files of ``layout`` into ``folder`` (a path from the place)."""

    def complete(self, document: JsonObject) -> dict[str, str]:
        """On the first rank: give all its names, see ``Staging.complete``."""
        assert self.staging is not None, "the first rank has it"
        return self.staging.complete(document)

    def discard(self) -> None:
        """On the first rank: remove what has no names yet."""
        if self.staging is not None:
            self.staging.discard()


class Output(ABC):
    """How the tensors of one layout are written by all ranks, in this order."""

    #: Bytes at multiples of which writes begin.
    page: int = PAGE

    @abstractmethod
    def tuned(self, memory_limit: int | None) -> tuple[int, int]:
        """Bytes of a write, and threads. Raises ConfigError for a limit that is too low."""

    @abstractmethod
    def begin(self) -> Any:
        """On the first rank, before any writes: what the others have to know. Raises WriteError."""

    @abstractmethod
    def write(
        self,
        begun: Any,
        plan: WritePlan,
        storages: Sequence[Source],
        threads: int,
        noted: Noted,
        world: World,
    ) -> None:
        """Write this rank's share, all of which has come to its place in the end. Raises WriteError."""

    @abstractmethod
    def commit(self, world: World) -> None:
        """After all ranks have written; collective."""

    @abstractmethod
    def discard(self) -> None:
        """Remove what this rank can, after an error."""


class Files(Place):
    """A directory of a file system."""

    def __init__(self, directory: Path, staging: Staging | None) -> None:
        self.directory, self.staging = directory, staging
        self.name = str(directory.parents[1])

    def check_visible(self, world: World) -> None:
        """See ``Place``."""
        if not self.directory.is_dir():
            raise WriteError(
                f"{self.directory}: rank {world.rank} does not see the directory that rank 0 made; save to "
                "a file system that all ranks share"
            )

    def check_room(self, nbytes: int, what: str) -> None:
        """See ``Place``."""
        check_space(self.directory, nbytes, what)

    def output(self, folder: str, layout: SaveLayout) -> Output:
        """See ``Place``."""
        return _FileOutput(self.directory / folder, layout)


class _FileOutput(Output):
    def __init__(self, directory: Path, layout: SaveLayout) -> None:
        self._directory, self._layout = directory, layout
        self._writer: CheckpointWriter | None = None

    def tuned(self, memory_limit: int | None) -> tuple[int, int]:
        if memory_limit is not None and memory_limit < MIN_CHUNK:
            raise ConfigError(f"memory_limit={memory_limit} must be a number of bytes, at least {MIN_CHUNK}")
        beside = ROOM + SLACK
        limit = THREADS * (CHUNK + beside) if memory_limit is None else memory_limit
        threads = min(most_threads(), max(1, limit // (MIN_CHUNK + beside)))
        chunk = min(CHUNK, max(MIN_CHUNK, limit // threads - beside))
        if rounds_up():  # so that a buffer, which is a chunk and SLACK, is a power of two
            chunk = max(MIN_CHUNK, (1 << ((chunk + SLACK).bit_length() - 1)) - SLACK)
        return chunk - chunk % 4096, threads

    def begin(self) -> str:
        token = uuid.uuid4().hex[:12]
        check_space(self._directory, self._layout.total_size, "what is to be saved")
        self._writer = CheckpointWriter(self._directory, self._layout, token)
        self._writer.create()
        return token

    def write(
        self,
        begun: Any,
        plan: WritePlan,
        storages: Sequence[Source],
        threads: int,
        noted: Noted,
        world: World,
    ) -> None:
        # Rank 0 has made the files inside ``begin``; the others open them by its token.
        self._writer = self._writer or CheckpointWriter(self._directory, self._layout, begun)
        write_out(plan, storages, self._writer, threads, noted)
        self._writer.close()

    def commit(self, world: World) -> None:
        if world.rank == 0 and self._writer is not None:
            self._writer.commit()

    def discard(self) -> None:
        if self._writer is not None:
            self._writer.discard()


def most_threads() -> int:
    """How many threads of a rank write at once."""
    return min(THREADS, max(2, int(cores()) // local_ranks()))
