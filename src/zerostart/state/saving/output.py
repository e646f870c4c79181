"""Where the ranks' bytes of a save go: into files of a directory that all see, or into objects of a store."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerostart.checkpoint.digest import ROOM
from zerostart.checkpoint.storage import uploads_at
from zerostart.checkpoint.storage.direct import PAGE
from zerostart.checkpoint.storage.uploads import Uploads
from zerostart.checkpoint.strict_json import JsonObject
from zerostart.checkpoint.write.objects import ObjectStaging, part_length
from zerostart.checkpoint.write.parts import Receipts, Uploading
from zerostart.checkpoint.write.shards import SaveLayout
from zerostart.checkpoint.write.space import check_space
from zerostart.checkpoint.write.staging import Staging
from zerostart.checkpoint.write.writer import CheckpointWriter
from zerostart.distributed.machine import cores, local_ranks
from zerostart.distributed.world import World
from zerostart.errors import ConfigError, WriteError
from zerostart.transfer.buffers import rounds_up
from zerostart.transfer.planning.writes import WritePlan
from zerostart.transfer.tuning import MIN_CHUNK
from zerostart.transfer.uploading import upload_together
from zerostart.transfer.writing import SLACK, Noted, Source, write_out

MiB = 1 << 20
#: Bytes of one write, and of a thread's staging buffer, where no limit asks for less.
CHUNK = 8 * MiB
#: Most threads that write on one rank.
THREADS = 4
#: Parts that a rank uploads at once, and those that it takes beside: what it sends, while it is packed and
#: joined, what it gets, and a last part that is shorter.
DEPTH, BESIDE = 4, 4
#: A staging buffer's bytes where parts are put together: several threads fill one part.
PART_CHUNK = 2 * MiB  # so that parts are multiples of it


class Place(ABC):
    """A directory that is being saved to, as one rank has it: of files, or of objects.

    ``directory`` is where small files are written, by the first rank.
    """

    directory: Path
    #: What to call it.
    name: str
    #: On the first rank what is written, and has no names yet.
    staging: Staging | ObjectStaging | None
    #: Whether files are put together on the disks of the ranks' machines first.
    staged: bool = False

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


def begin_place(
    path: Path | str, marker: str, by_document: bool | None
) -> tuple[Place, tuple[str, Uploads | None]]:
    """On the first rank: begin to save to a directory or a URL; and what the others find it by.

    Raises WriteError, and ConfigError for a URL to which nothing is saved.
    """
    uploads = uploads_at(path)
    if uploads is not None:
        objects = ObjectStaging(uploads, marker, by_document)
        return Objects(objects.directory, objects.uploads, objects), ("", objects.uploads)
    staging = Staging(path, marker, by_document)
    return Files(staging.directory, staging), (str(staging.directory), None)


def joined_place(found: tuple[str, Uploads | None]) -> Place:
    """On the other ranks: the place that the first one has begun."""
    directory, uploads = found
    return Files(Path(directory), None) if uploads is None else Objects(Path(), uploads, None)


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


class Objects(Place):
    """A directory of a store."""

    staging: ObjectStaging | None

    def __init__(self, directory: Path, uploads: Uploads, staging: ObjectStaging | None) -> None:
        self.directory, self._uploads, self.staging = directory, uploads, staging
        self.name, self.staged = uploads.url, uploads.staged

    def check_visible(self, world: World) -> None:
        """See ``Place``: each request tells."""

    def check_room(self, nbytes: int, what: str) -> None:
        """See ``Place``: a store has room."""

    def output(self, folder: str, layout: SaveLayout) -> Output:
        """See ``Place``."""
        return _PartOutput(self._uploads, self.staging, folder, layout)


class _PartOutput(Output):
    def __init__(
        self, uploads: Uploads, staging: ObjectStaging | None, folder: str, layout: SaveLayout
    ) -> None:
        self._uploads, self._staging, self._folder, self._layout = uploads, staging, folder, layout
        self._part = part_length(layout)
        self._depth = DEPTH
        self._receipts: Receipts = {}
        self.page = PART_CHUNK

    def tuned(self, memory_limit: int | None) -> tuple[int, int]:
        threads = most_threads()
        beside = threads * (PART_CHUNK + SLACK + ROOM) + BESIDE * self._part
        if memory_limit is not None:
            self._depth = min(4 * DEPTH, (memory_limit - beside) // self._part)
            if self._depth < 1:
                raise ConfigError(
                    f"memory_limit={memory_limit}: to save to a store takes {beside + self._part} bytes at "
                    "least, for parts of objects"
                )
        return PART_CHUNK, threads

    def begin(self) -> list[Uploading]:
        assert self._staging is not None, "the first rank has it"
        return self._staging.begin_files(self._folder, self._layout)

    def write(
        self,
        begun: Any,
        plan: WritePlan,
        storages: Sequence[Source],
        threads: int,
        noted: Noted,
        world: World,
    ) -> None:
        self._receipts = upload_together(
            plan,
            storages,
            self._uploads,
            begun,
            world,
            part=self._part,
            depth=self._depth,
            threads=threads,
            noted=noted,
        )

    def commit(self, world: World) -> None:
        every = world.all_gather_object(self._receipts, "telling what was uploaded")

        def end() -> None:
            assert self._staging is not None, "the first rank has it"
            receipts = {place: one for told in every for place, one in told.items()}
            self._staging.end_files(self._folder, self._layout, receipts)

        world.broadcast_object(end, "completing the files")

    def discard(self) -> None:
        """Nothing: the first rank's staging removes all."""


def most_threads() -> int:
    """How many threads of a rank write at once."""
    return min(THREADS, max(2, int(cores()) // local_ranks()))
