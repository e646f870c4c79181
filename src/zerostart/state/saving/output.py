"""Write the ranks' bytes of a save into files of a directory that all ranks see."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerostart.checkpoint.digest import ROOM
from zerostart.checkpoint.storage.direct import PAGE
from zerostart.checkpoint.write.shards import SaveLayout
from zerostart.checkpoint.write.space import check_space
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


class Files:
    """A directory of a file system that is saved to; rank 0 writes small files into ``directory``."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.name = directory, str(directory.parents[1])

    def check_visible(self, world: World) -> None:
        """Raise WriteError if this rank does not see the directory."""
        if not self.directory.is_dir():
            raise WriteError(
                f"{self.directory}: rank {world.rank} does not see the directory that rank 0 made; save to "
                "a file system that all ranks share"
            )

    def output(self, folder: str, layout: SaveLayout) -> FileOutput:
        """Return the writer of the files of ``layout`` in ``folder``."""
        return FileOutput(self.directory / folder, layout)


class FileOutput:
    """Writes the files of one layout, each rank its own bytes."""

    #: Writes begin at multiples of this, in bytes.
    page = PAGE

    def __init__(self, directory: Path, layout: SaveLayout) -> None:
        self._directory, self._layout = directory, layout
        self._writer: CheckpointWriter | None = None

    def tuned(self, memory_limit: int | None) -> tuple[int, int]:
        """Return the bytes of a write and the number of threads. Raises ConfigError for a low limit."""
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
        """Make the files on rank 0, and return their token. Raises WriteError."""
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
        """Write the share of this rank, and sync it. Raises WriteError."""
        # Rank 0 has made the files inside ``begin``; the others open them by its token.
        self._writer = self._writer or CheckpointWriter(self._directory, self._layout, begun)
        write_out(plan, storages, self._writer, threads, noted)
        self._writer.close()

    def commit(self, world: World) -> None:
        """Rename the files on rank 0, after all ranks have written."""
        if world.rank == 0 and self._writer is not None:
            self._writer.commit()

    def discard(self) -> None:
        """Remove the files of this rank after an error."""
        if self._writer is not None:
            self._writer.discard()


def most_threads() -> int:
    """How many threads of a rank write at once."""
    return min(THREADS, max(2, int(cores()) // local_ranks()))
