"""Write and publish a checkpoint directory together with all ranks."""

from __future__ import annotations

import os
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
from zerostart.transfer.planning.writes import Origin, WritePlan, plan_writes, split_shares
from zerostart.transfer.tuning import MIN_CHUNK
from zerostart.transfer.writing import SLACK, Change, OnWrite, Source, write_out

MiB = 1 << 20
#: Default size of one write and of a thread's staging buffer, in bytes.
CHUNK = 8 * MiB
#: Maximum number of threads that write on one rank.
THREADS = 4
#: Name, dtype in safetensors' spelling, and shape of a tensor of the files.
Entry = tuple[str, str, Sequence[int]]


@dataclass(frozen=True)
class Outgoing:
    """A rank's share of one logical tensor to write."""

    #: Maps each element of its target to an element of a tensor in the files.
    recipe: Recipe
    #: The elements that this rank holds.
    shard: Shard
    #: Returns the elements to write for a run of the shard's; None: the shard's own.
    change: Change | None = None


@dataclass(frozen=True)
class Written:
    """The result of ``write_tensors``: layout, bytes of this rank, and digests."""

    layout: SaveLayout
    bytes: int
    digests: Mapping[str, str] = field(default_factory=dict)


def describe_share(name: str, shard: Shard, dtype: torch.dtype | None = None) -> Outgoing:
    """Describe ``shard`` as the tensor ``name`` of the files, in the same layout."""
    target = Target(name, shard.layout.shape, dtype or shard.storage.dtype)
    return Outgoing(Recipe(target, geometry.whole(name, shard.layout.shape)), shard)


def size_of_entry(entry: Entry) -> int:
    """Return the size of a tensor in a file, in bytes."""
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
    """Write ``entries`` into safetensors files in ``folder`` of a publication; collective.

    ``entries``, and the targets of ``outgoing``, have the same order on all ranks. Together the ranks hold
    each element once (``Shard.replica`` marks replicas). ``memory_limit`` is the maximum size of a rank's
    buffers, in bytes; None: 40 MiB, and 64 MiB for a store. The other arguments are those of
    ``plan_shards``. Raises WriteError, ConfigError, and CheckpointError for an element that no rank or two
    ranks hold; then no file is left.
    """
    output: FileOutput | StoreOutput | None = None
    try:
        # All ranks leave this phase together: no rank writes while the files are deleted.
        with world.phase("writing the tensors"):
            listed = list(entries)
            layout = plan_shards(listed, max_shard_size, stem, metadata, parameters, before)
            digests = Digests(listed)
            output = publication.place.output(folder, layout)
            chunk, threads = output.choose_chunk(memory_limit)
            plan, storages = plan_own_writes(layout, outgoing, chunk, output.page)
            described = repr((listed, parse_size(max_shard_size), metadata, parameters, before)).encode()
            # A rank with other tensors or files would overwrite bytes of other ranks: the checksum in the
            # name of the collective turns that into an error.
            place = f"writing {stem} files with the checksum {zlib.crc32(described):08x}"
            token = world.broadcast_object(output.begin, place)
            output.write(token, plan, storages, threads, digests.add_rows, world)
            # Digests are sums over elements, so partial digests of the ranks add up. After the reduction
            # every rank has closed its files, and rank 0 may commit.
            sums = digests.summed(world)
            output.commit(world)
    except BaseException:
        if output is not None:
            output.discard()
        raise
    return Written(layout, plan.nbytes, sums)


def share(shard: Shard) -> tuple[Layout, tuple[int, int], int]:
    """Return the layout, replica and element size of a shard, as ``split_shares`` takes them."""
    return shard.layout, shard.replica, shard.storage.itemsize


def plan_own_writes(
    layout: SaveLayout, outgoing: Iterable[Outgoing], chunk_size: int, page: int = PAGE
) -> tuple[WritePlan, list[Source]]:
    """Plan the writes of this rank; return the plan and its storages."""
    storages: list[Source] = []

    def own() -> Iterator[tuple[Recipe, Layout, Origin]]:
        items = list(outgoing)
        # The order of ``outgoing`` decides which replica writes an element, so it must be the same on all
        # ranks, also on those with nothing to write.
        for item, part in zip(items, split_shares(share(item.shard) for item in items), strict=True):
            storage = item.shard.storage.detach()
            if part is not None and part.boxes:
                direct = storage.device.type == "cpu" and item.change is None
                origin = Origin(storage.dtype, direct)
                storages.append(Source(storage, item.change))
                yield item.recipe, part, origin

    return plan_writes(layout, own(), chunk_size, page), storages


class LocalPlace:
    """A local directory to save to; rank 0 writes small files into it."""

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
    """Writer of the files of one layout; each rank writes its own bytes."""

    #: Alignment of writes, in bytes.
    page = PAGE

    def __init__(self, directory: Path, layout: SaveLayout) -> None:
        self._directory, self._layout = directory, layout
        self._writer: CheckpointWriter | None = None

    def choose_chunk(self, memory_limit: int | None) -> tuple[int, int]:
        """Return the size of a write, in bytes, and the number of threads.

        Raises ConfigError for a low limit.
        """
        if memory_limit is not None and memory_limit < MIN_CHUNK:
            raise ConfigError(f"memory_limit={memory_limit} must be a number of bytes, at least {MIN_CHUNK}")
        overhead = ROOM + SLACK
        limit = THREADS * (CHUNK + overhead) if memory_limit is None else memory_limit
        threads = min(THREADS, max(2, int(cores()) // local_ranks()), max(1, limit // (MIN_CHUNK + overhead)))
        chunk = min(CHUNK, max(MIN_CHUNK, limit // threads - overhead))
        return chunk - chunk % 4096, threads

    def begin(self) -> None:
        """Create the files on rank 0. Raises WriteError."""
        check_space(self._directory, self._layout.total_size, "the save")
        self._writer = CheckpointWriter(self._directory, self._layout)
        self._writer.create()

    def write(
        self,
        token: Any,
        plan: WritePlan,
        storages: Sequence[Source],
        threads: int,
        observer: OnWrite,
        world: World,
    ) -> None:
        """Write the share of this rank, and sync it. Raises WriteError."""
        # ``begin`` created the files on rank 0.
        self._writer = self._writer or CheckpointWriter(self._directory, self._layout)
        write_out(plan, storages, self._writer, threads, observer)
        self._writer.close()

    def commit(self, world: World) -> None:
        """Write the index on rank 0, after all ranks have written."""
        if world.rank == 0 and self._writer is not None:
            self._writer.commit()

    def discard(self) -> None:
        """Close the files of this rank after an error."""
        if self._writer is not None:
            self._writer.discard()


@dataclass(frozen=True)
class Publication:
    """A save before it is published."""

    place: LocalPlace | StorePlace
    #: Content of ``zerostart.json`` or ``state.json``; only rank 0's is written.
    document: JsonObject = field(default_factory=dict)
    #: Final names of weights by their staged names; filled on all ranks by the publication.
    names: dict[str, str] = field(default_factory=dict)

    @property
    def directory(self) -> Path:
        """Folder for the files next to the weights, which rank 0 writes."""
        return self.place.directory

    @contextmanager
    def open_phase(self, world: World, name: str) -> Iterator[None]:
        """Open a phase in which an OSError becomes a WriteError on all ranks."""
        with world.phase(name), write_errors(self.place.name, "nothing was saved"):
            yield

    def add_digests(self, digests: Mapping[str, str], folder: str = ".") -> None:
        """Add the digests of all tensors in the safetensors files of ``folder``."""
        self.document.setdefault("digests", {}).setdefault(folder, {}).update(digests)


def agree_on_place(path: str | os.PathLike[str], world: World, doing: str = "saving to") -> Path | str:
    """Return rank 0's absolute form of a directory or URL; collective, inside a phase.

    ``doing`` names the action in errors. Raises ConfigError if a rank has another path.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    if not text:
        raise ConfigError(f"{doing} {path!r}: pass the path of a directory")
    place: Path | str = world.broadcast_object(lambda: located(text), f"{doing} {shown_url(text)}")
    return place


@contextmanager
def open_publication(
    path: str | os.PathLike[str], world: World, *, marker: str = MARKER
) -> Iterator[Publication]:
    """Stage a save into ``path`` and publish it after the body; collective.

    ``marker`` is the argument of ``Staging``. After an error on any rank all written files are deleted.
    Raises WriteError, or the error of the body, on every rank.
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
        at = agree_on_place(path, world)
        try:
            target = world.broadcast_object(begin, "making a directory to save to")
            store = None if isinstance(staging, Staging) else staging
            place = LocalPlace(target) if isinstance(target, Path) else StorePlace(target, store)
            publication = Publication(place)
            with publication.open_phase(world, "writing the files"):
                place.check_visible(world)
                yield publication
            publication.names.update(world.broadcast_object(complete, "giving the files their names"))
        except BaseException:
            if staging is not None:
                staging.discard()
            raise
