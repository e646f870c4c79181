"""Write a directory with all ranks, each its own bytes; readers see the whole or nothing."""

from __future__ import annotations

import os
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from zerostart import geometry
from zerostart.checkpoint.digest import ROOM, Digests
from zerostart.checkpoint.manifest import MARKER
from zerostart.checkpoint.paths import located, shown_url
from zerostart.checkpoint.storage.direct import PAGE
from zerostart.checkpoint.storage.upload import StoreDirectory
from zerostart.checkpoint.strict_json import JsonObject
from zerostart.checkpoint.write.folders import check_space
from zerostart.checkpoint.write.shards import SaveLayout, parse_size, plan_shards
from zerostart.checkpoint.write.staging import Staging, write_errors
from zerostart.checkpoint.write.store import StoreStaging
from zerostart.checkpoint.write.writer import CheckpointWriter
from zerostart.distributed.machine import cores, local_ranks
from zerostart.distributed.world import World
from zerostart.engines import Shard
from zerostart.errors import ConfigError, WriteError
from zerostart.geometry.layout import Layout
from zerostart.recipe import Recipe, Target
from zerostart.recipe.dtypes import torch_dtype
from zerostart.state.saving.to_store import StoreOutput, StorePlace
from zerostart.transfer.buffers import rounds_up
from zerostart.transfer.planning.writes import Origin, WritePlan, plan_writes, split_shares
from zerostart.transfer.tuning import MIN_CHUNK
from zerostart.transfer.writing import SLACK, Change, OnWrite, Source, write_out

MiB = 1 << 20
#: Bytes of one write, and of a thread's staging buffer, where no limit asks for less.
CHUNK = 8 * MiB
#: Most threads that write on one rank.
THREADS = 4
#: Name, dtype in safetensors' spelling, and shape of a tensor of the files.
Entry = tuple[str, str, Sequence[int]]


@dataclass(frozen=True)
class Outgoing:
    """A share of one logical tensor that goes into the files."""

    #: Of each element of its target, which element of which tensor of the files it is.
    recipe: Recipe
    #: Which of them this rank has.
    shard: Shard
    #: If any, it is asked for what is written in the place of the shard's elements, some at a time.
    change: Change | None = None


@dataclass(frozen=True)
class Written:
    """The result of ``write_tensors``: the bytes of this rank, and a digest of each tensor."""

    layout: SaveLayout
    bytes: int
    digests: Mapping[str, str] = field(default_factory=dict)


def plain(name: str, shard: Shard, dtype: torch.dtype | None = None) -> Outgoing:
    """Return ``shard`` as the tensor ``name`` of the files, in the same layout."""
    target = Target(name, shard.layout.shape, dtype or shard.storage.dtype)
    return Outgoing(Recipe(target, geometry.whole(name, shard.layout.shape)), shard)


def entry_bytes(entry: Entry) -> int:
    """Bytes of a tensor in a file."""
    _, dtype, shape = entry
    return prod(shape) * torch_dtype(dtype).itemsize


def write_tensors(
    publication: Publication,
    entries: Iterable[Entry],
    outgoing: Iterable[Outgoing],
    world: World,
    *,
    folder: str = ".",
    stem: str = "model",
    max_shard_size: int | str = "5GB",
    metadata: Mapping[str, str] | None = None,
    parameters: int | None = None,
    memory_limit: int | None = None,
    before: Mapping[str, int] | None = None,
) -> Written:
    """Write the tensors ``entries`` into safetensors files in ``folder`` of what is published; collective.

    ``entries``, and the targets of ``outgoing``, have one order on all ranks. Together the ranks have each
    element once (``Shard.held`` tells replicas). ``memory_limit`` limits the buffers of a rank, in bytes;
    None: 40 MiB, and 64 for a store. The other arguments are those of ``plan_shards``. Raises WriteError,
    ConfigError and, if an element is on no rank or counted by two, CheckpointError; then no file is left.
    """
    output: FileOutput | StoreOutput | None = None
    try:
        # All ranks leave this together: nobody still writes when the files are removed.
        with world.phase("writing the tensors"):
            listed = list(entries)
            layout = plan_shards(listed, max_shard_size, stem, metadata, parameters, before)
            digests = Digests(listed)
            output = publication.place.output(folder, layout)
            chunk, threads = output.tuned(memory_limit)
            plan, storages = planned(layout, outgoing, chunk, output.page)
            described = repr((listed, parse_size(max_shard_size), metadata, parameters, before)).encode()
            # With other tensors, or other files, a rank would write to places that are another's: told here.
            place = f"writing {stem} files with the checksum {zlib.crc32(described):08x}"
            made = world.broadcast_object(output.begin, place)
            output.write(made, plan, storages, threads, digests.add_rows, world)
            # Digests are sums over elements, so that ranks' partial ones add up to those of whole tensors.
            # The reduction is also where the ranks meet: after it each has closed its files, and only then
            # may rank 0 commit.
            known = digests.summed(world)
            output.commit(world)
    except BaseException:
        if output is not None:
            output.discard()
        raise
    return Written(layout, plan.nbytes, known)


def share(shard: Shard) -> tuple[Layout, tuple[int, int], int]:
    return shard.layout, shard.held, shard.storage.itemsize


def planned(
    layout: SaveLayout, outgoing: Iterable[Outgoing], chunk_size: int, page: int = PAGE
) -> tuple[WritePlan, list[Source]]:
    """Plan what this rank writes of ``outgoing``; returns the storages of the plan, too."""
    storages: list[Source] = []

    def own() -> Iterator[tuple[Recipe, Layout, Origin]]:
        items = list(outgoing)
        # Of replicas of an element one rank writes it; who, follows from the order of ``outgoing``, so it
        # must be the same on all ranks, also where one has nothing to write.
        for item, part in zip(items, split_shares(share(item.shard) for item in items), strict=True):
            storage = item.shard.storage.detach()
            if part is not None and part.boxes:
                direct = storage.device.type == "cpu" and item.change is None
                origin = Origin(storage.dtype, direct)
                storages.append(Source(storage, item.change))
                yield item.recipe, part, origin

    return plan_writes(layout, own(), chunk_size, page), storages


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
        noted: OnWrite,
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


@dataclass(frozen=True)
class Publication:
    """A save before it is published."""

    place: Files | StorePlace
    #: Rank 0's is written as ``zerostart.json`` or ``state.json``.
    document: JsonObject = field(default_factory=dict)
    #: Final names of weights by their staged names; filled on all ranks by the publication.
    names: dict[str, str] = field(default_factory=dict)

    @property
    def directory(self) -> Path:
        """Folder for the files next to the weights, which rank 0 writes."""
        return self.place.directory

    @contextmanager
    def written(self, world: World, name: str) -> Iterator[None]:
        """Open a phase in which an error of the system is a WriteError on all ranks."""
        with world.phase(name), write_errors(self.place.name, "nothing was saved"):
            yield

    def add_digests(self, digests: Mapping[str, str], folder: str = ".") -> None:
        """Add the digests of all tensors in the safetensors files of ``folder``."""
        self.document.setdefault("digests", {}).setdefault(folder, {}).update(digests)


def agreed_place(path: str | os.PathLike[str], world: World, doing: str = "saving to") -> Path | str:
    """Return rank 0's absolute form of the directory or URL ``path``; collective, inside a phase.

    ``doing`` is the action in words. Raises ConfigError if a rank has another path.
    """
    given = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    if not given:
        raise ConfigError(f"{doing} {path!r}: pass the path of a directory")
    found: Path | str = world.broadcast_object(lambda: located(given), f"{doing} {shown_url(given)}")
    return found


@contextmanager
def publishing(path: str | os.PathLike[str], world: World, *, marker: str = MARKER) -> Iterator[Publication]:
    """Stage a save into the directory or URL ``path``, and publish it after the body; collective.

    ``marker`` is that of ``Staging``. After an error on any rank all that was written
    is removed. Raises WriteError, or the error of the body, on every rank.
    """
    staging: Staging | StoreStaging | None = None

    def begin() -> Path | StoreDirectory:
        nonlocal staging
        if isinstance(at, str):
            store = StoreDirectory.at(at)
            staging = StoreStaging(store, marker)
            return store
        staging = Staging(at, marker)
        return staging.directory

    def complete() -> dict[str, str]:
        assert staging is not None, "rank 0 has it"
        return staging.complete(publication.document)

    with world.phase("saving to a directory"):
        at = agreed_place(path, world)
        try:
            found = world.broadcast_object(begin, "making a directory to save to")
            store = None if isinstance(staging, Staging) else staging
            place = Files(found) if isinstance(found, Path) else StorePlace(found, store)
            publication = Publication(place)
            with publication.written(world, "writing the files"):
                place.check_visible(world)
                yield publication
            publication.names.update(world.broadcast_object(complete, "giving the files their names"))
        except BaseException:
            if staging is not None:
                staging.discard()
            raise
