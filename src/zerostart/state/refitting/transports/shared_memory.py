"""Workers on the trainer's machine: the image is a file in memory that all have mapped.

Trainer ranks write their elements to their places in it, workers read theirs out of it; each byte is copied
twice, and nothing is sent. Accelerators copy to and from it by themselves: what they need of it is
page-locked when they first do. The file has its full size from the beginning, so that no write finds memory
missing, and nobody but its owner's user can open it. For deltas trainer ranks compare what they write with
what is there, and note in a second file in which version a block has last changed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from rich.filesize import decimal

from zerostart.checkpoint.memory import MemoryReader, move_bytes
from zerostart.checkpoint.storage import Reader
from zerostart.checkpoint.strict_json import JsonObject
from zerostart.distributed.world import World, default_device
from zerostart.errors import ConfigError, ReadError, WriteError
from zerostart.state.refitting.changes import BLOCK, Blocks, Changed
from zerostart.state.refitting.image import Image
from zerostart.state.refitting.transports.base import (
    Carried,
    ImageWriter,
    Incoming,
    Transport,
    WorkerInfo,
    register_transport,
)
from zerostart.transfer.buffers import LockedSpans
from zerostart.transfer.planning.runs import Runs
from zerostart.transfer.staging import bytes_view
from zerostart.transfer.writing import Writer

logger = logging.getLogger("zerostart")


class _Mapped:
    """A file in memory as a row of bytes."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self._locked: LockedSpans | None = None
        #: What has been asked to be locked.
        self._asked: Runs | None = None
        self._lock = threading.Lock()
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(handle).st_size != nbytes:
                raise ReadError(
                    f"{path} has {os.fstat(handle).st_size} bytes and not {nbytes}: it is another image"
                )
            # Shared and writable also where nobody writes: torch knows no other memory, and of private pages
            # those that are locked would be copied.
            self._memory = mmap.mmap(handle, nbytes, mmap.MAP_SHARED)
        finally:
            os.close(handle)
        self.data = torch.frombuffer(self._memory, dtype=torch.uint8)

    def lock(self, runs: Runs) -> bool:
        """Have page-locked all that this process copies to or from accelerators; False if it cannot be."""
        with self._lock:
            if self._asked is not runs:
                self._unlock()
                self._asked = runs
                spans = [(low, high) for low, high in runs.spans.tolist()]
                self._locked = LockedSpans.of(self.data, spans, default_device())
                if self._locked is None:
                    logger.warning(
                        "an image of %s in shared memory cannot be page-locked here: what accelerators copy "
                        "to and from it goes through buffers, and takes longer",
                        decimal(runs.nbytes),
                    )
            return self._locked is not None

    def _unlock(self) -> None:
        if self._locked is not None:
            self._locked.release()
        self._locked = None

    def blocks(self, nbytes: int) -> Blocks:
        """As those of an image of ``nbytes``."""
        return Blocks(nbytes, self._memory)

    def close(self) -> None:
        """Give the mapping up."""
        self._unlock()
        self.data = torch.empty(0, dtype=torch.uint8, device="cpu")
        with contextlib.suppress(BufferError):  # somebody still reads: it goes with the last reference
            self._memory.close()


class SharedMemory:
    """The side of a trainer rank."""

    name = "shared_memory"
    note = ""

    def __init__(self, world: World, folder: Path, deltas: bool) -> None:
        """``folder`` is rank 0's, which every rank has to see."""
        self._world = world
        self._path = folder / "image"
        self._deltas = deltas
        self._mapped: _Mapped | None = None
        self._noted: _Mapped | None = None
        self._image: Image | None = None
        self._own = Runs.of([])
        self._moved = self._changed = 0
        self._lock = threading.Lock()

    def open(self, image: Image, own: Runs, workers: Sequence[WorkerInfo]) -> Mapping[str, JsonObject]:
        """Make the file, and map it; collective."""
        if self._image is None or self._image.fingerprint != image.fingerprint:
            self.close()
            self._world.broadcast_object(lambda: self._make(image), "making an image in shared memory")
            with self._world.phase("mapping the image"):
                try:
                    self._mapped = _Mapped(self._path, image.nbytes)
                    if self._deltas:
                        self._noted = _Mapped(_noted(self._path), Blocks.room(image.nbytes))
                except OSError as error:
                    raise ConfigError(
                        f"{self._path} cannot be opened on rank {self._world.rank}: "
                        f"{error.strerror or error}; "
                        "transport='shared_memory' is for one machine: use 'group' across machines"
                    ) from error
            self._image = image
        if not np.array_equal(self._own.rows, own.rows):
            self._own = own
        return {worker.name: {"path": str(self._path), "noted": self._deltas} for worker in workers}

    def writer(self, version: int, base: int | None) -> Writer:
        """Copies into the mapping."""
        assert self._mapped is not None, "opened before"
        assert self._image is not None, "opened before"
        self._moved = self._changed = 0
        blocks = None if self._noted is None else self._noted.blocks(self._image.nbytes)
        return _MappedWriter(
            self._mapped, self._own, self._image, self._count, blocks, version, base is not None
        )

    def finish(self) -> None:
        """What is written is there at once."""

    def abort(self) -> None:
        """Nobody reads a version that was not decided."""

    def carried(self) -> Carried:
        """What was written."""
        return Carried(self._moved, self._changed)

    def close(self) -> None:
        """Unmap the file; it is removed with its folder."""
        if self._mapped is not None:
            self._mapped.close()
        if self._noted is not None:
            self._noted.close()
        self._mapped = self._noted = self._image = None

    def _count(self, moved: int, changed: int) -> None:
        with self._lock:
            self._moved += moved
            self._changed += changed

    def _make(self, image: Image) -> None:
        files = {self._path: (image.nbytes, image.header)}
        if self._deltas:
            files[_noted(self._path)] = (Blocks.room(image.nbytes), b"")
        try:
            for path, (nbytes, begin) in files.items():
                path.unlink(missing_ok=True)
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                try:
                    # All of it at once: a page that is missing later would end the process that writes to it.
                    os.posix_fallocate(handle, 0, nbytes)
                    os.pwrite(handle, begin, 0)
                finally:
                    os.close(handle)
        except OSError as error:
            free = os.statvfs(self._path.parent)
            room = free.f_bavail * free.f_frsize
            remedy = (
                "enlarge it, or use transport='group'"
                if error.errno == errno.ENOSPC
                else "see its permissions"
            )
            raise WriteError(
                f"{self._path}: an image of {image.nbytes} bytes cannot be made there ({error.strerror}, "
                f"{room} bytes are free): {remedy}"
            ) from error


def _noted(path: Path) -> Path:
    """The file of the blocks of an image."""
    return path.with_name(f"{path.name}-blocks")


class _MappedWriter(ImageWriter):
    """Rows into a mapping."""

    def __init__(
        self,
        mapped: _Mapped,
        own: Runs,
        image: Image,
        count: Callable[[int, int], None],
        blocks: Blocks | None,
        version: int,
        compared: bool,
    ) -> None:
        super().__init__(image.layout)
        self._mapped, self._own, self._memory = mapped, own, mapped.data
        self._count, self._blocks = count, blocks
        self._version, self._compared = version, compared

    def locked(self, name: str, offset: int, nbytes: int) -> torch.Tensor | None:
        """See ``LockedWriter``; what is compared with what was there comes by the host."""
        if self._compared or not self._mapped.lock(self._own):
            return None
        low = self._tensors[name].offset + offset
        if self._blocks is not None:
            self._blocks.note(low, low + nbytes, self._version)
        self._count(nbytes, nbytes)
        return self._memory[low : low + nbytes]

    def put(self, place: int, data: torch.Tensor, length: int, step: int, rows: int) -> None:
        """Copy; torch lets other threads run meanwhile."""
        if step == length:
            length, rows = rows * length, 1
        if rows == 1:
            # Pieces that end with a block, so that one that is as it was is told by itself.
            edges = range((place // BLOCK + 1) * BLOCK, place + length, BLOCK) if self._compared else ()
            for low, high in pairwise([place, *edges, place + length]):
                self._copy(self._memory[low:high], data[low - place : high - place], low, high)
            return
        shape, strides = (rows, length), (step, 1)
        high = place + (rows - 1) * step + length
        self._copy(
            self._memory.as_strided(shape, strides, place), data.as_strided(shape, strides), place, high
        )

    def _copy(self, there: torch.Tensor, now: torch.Tensor, low: int, high: int) -> None:
        """Into bytes from ``low`` up to ``high``, or a part of them."""
        changed = now.numel()
        if self._compared:
            changed = int(np.count_nonzero(there.numpy() != now.numpy()))
            if not changed:
                return
        if there.dim() == 1:
            move_bytes(there, now)
        else:
            there.copy_(now)
        if self._blocks is not None:
            self._blocks.note(low, high, self._version)
        self._count(now.numel(), changed)


class _MappedReader(MemoryReader):
    """Of a mapping."""

    def __init__(self, mapped: _Mapped, wants: Runs) -> None:
        super().__init__([mapped.data])
        self._mapped, self._wants = mapped, wants

    def locked(self, file: int, offset: int, nbytes: int) -> memoryview | None:
        """Where they lie, which is within what the worker wants, if that can be locked."""
        if not self._mapped.lock(self._wants):
            return None
        return bytes_view(self._mapped.data)[offset : offset + nbytes]


class FromSharedMemory:
    """The side of a worker."""

    def __init__(self, image: Image, wants: Runs, path: Path, noted: bool) -> None:
        """``noted``: blocks that change are noted. Raises ConfigError where the file cannot be seen."""
        self._nbytes, self._wants = image.nbytes, wants
        self._noted: _Mapped | None = None
        try:
            self._mapped = _Mapped(path, image.nbytes)
            if noted:
                self._noted = _Mapped(_noted(path), Blocks.room(image.nbytes))
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be opened by this worker: {error.strerror or error}; "
                "transport='shared_memory' is for workers of the same user on the trainer's machine, which "
                "see its /dev/shm: else use 'group'"
            ) from error

    def prepare(self, version: int, check: Callable[[], None]) -> None:
        """The bytes are there when the session has decided."""

    def reader(self) -> Reader:
        """Of the mapping."""
        return _MappedReader(self._mapped, self._wants)

    def changed(self, since: int) -> Changed | None:
        """As the trainer has noted it."""
        return None if self._noted is None else self._noted.blocks(self._nbytes).since(since)

    def done(self) -> None:
        """The mapping stays for the next version."""

    def close(self) -> None:
        """Unmap the file."""
        self._mapped.close()
        if self._noted is not None:
            self._noted.close()


class _Kind:
    """Shared memory, by its name."""

    name = SharedMemory.name

    def outgoing(self, world: World, options: Mapping[str, object]) -> Transport:
        """In the folder of the refitter."""
        return SharedMemory(world, Path(str(options["folder"])), bool(options["deltas"]))

    def incoming(self, image: Image, wants: Runs, parameters: JsonObject) -> Incoming:
        """Of the file that the trainer names."""
        return FromSharedMemory(
            image, wants, Path(str(parameters.get("path"))), bool(parameters.get("noted"))
        )


register_transport(_Kind())
