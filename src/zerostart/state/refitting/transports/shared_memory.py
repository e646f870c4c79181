"""Workers on the trainer's machine: the image is a file in memory that all have mapped.

Trainer ranks write their elements to their places in it, workers read theirs out of it; each byte is copied
twice, and nothing is sent. The file has its full size from the beginning, so that no write finds memory
missing, and nobody but its owner's user can open it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from zerostart.checkpoint.memory import MemoryReader
from zerostart.checkpoint.storage import Reader
from zerostart.checkpoint.strict_json import JsonObject
from zerostart.distributed.world import World
from zerostart.errors import ConfigError, ReadError, WriteError
from zerostart.state.refitting.image import Image
from zerostart.state.refitting.transports.base import (
    ImageWriter,
    Incoming,
    Transport,
    WorkerInfo,
    register_transport,
)
from zerostart.transfer.planning.runs import Runs
from zerostart.transfer.writing import Writer


class _Mapped:
    """A file in memory as a row of bytes."""

    def __init__(self, path: Path, nbytes: int, writable: bool) -> None:
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(path, flags)
        try:
            if os.fstat(handle).st_size != nbytes:
                raise ReadError(
                    f"{path} has {os.fstat(handle).st_size} bytes and not {nbytes}: it is another image"
                )
            # Writable also where nobody writes, since torch knows no other memory; then of a copy of the
            # page.
            self._memory = mmap.mmap(handle, nbytes, mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE)
        finally:
            os.close(handle)
        self.data = torch.frombuffer(self._memory, dtype=torch.uint8)

    def close(self) -> None:
        """Give the mapping up."""
        self.data = torch.empty(0, dtype=torch.uint8, device="cpu")
        with contextlib.suppress(BufferError):  # somebody still reads: it goes with the last reference
            self._memory.close()


class SharedMemory:
    """The side of a trainer rank."""

    name = "shared_memory"

    def __init__(self, world: World, folder: Path) -> None:
        """``folder`` is rank 0's, which every rank has to see."""
        self._world = world
        self._path = folder / "image"
        self._mapped: _Mapped | None = None
        self._image: Image | None = None
        self._moved = 0
        self._lock = threading.Lock()

    def open(self, image: Image, own: Runs, workers: Sequence[WorkerInfo]) -> Mapping[str, JsonObject]:
        """Make the file, and map it; collective."""
        if self._image is None or self._image.fingerprint != image.fingerprint:
            self.close()
            self._world.broadcast_object(lambda: self._make(image), "making an image in shared memory")
            with self._world.phase("mapping the image"):
                try:
                    self._mapped = _Mapped(self._path, image.nbytes, True)
                except OSError as error:
                    raise ConfigError(
                        f"{self._path} cannot be opened on rank {self._world.rank}: "
                        f"{error.strerror or error}; "
                        "transport='shared_memory' is for one machine: use 'group' across machines"
                    ) from error
            self._image = image
        return {worker.name: {"path": str(self._path)} for worker in workers}

    def writer(self, version: int) -> Writer:
        """Copies into the mapping."""
        assert self._mapped is not None, "opened before"
        assert self._image is not None, "opened before"
        self._moved = 0
        return _MappedWriter(self._mapped.data, self._image, self._count)

    def finish(self) -> None:
        """What is written is there at once."""

    def abort(self) -> None:
        """Nobody reads a version that was not decided."""

    def moved(self) -> int:
        """Bytes that were written."""
        return self._moved

    def close(self) -> None:
        """Unmap the file; it is removed with its folder."""
        if self._mapped is not None:
            self._mapped.close()
        self._mapped = self._image = None

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._moved += nbytes

    def _make(self, image: Image) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        try:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                # All of it at once: a page that is missing later would end the process that writes to it.
                os.posix_fallocate(handle, 0, image.nbytes)
                os.pwrite(handle, image.header, 0)
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


class _MappedWriter(ImageWriter):
    """Rows into a mapping."""

    def __init__(self, memory: torch.Tensor, image: Image, count: Callable[[int], None]) -> None:
        super().__init__(image.layout)
        self._memory, self._count = memory, count

    def put(self, place: int, data: torch.Tensor, length: int, step: int, rows: int) -> None:
        """Copy; torch lets other threads run meanwhile."""
        if step == length:
            nbytes = rows * length
            self._memory[place : place + nbytes].copy_(data[:nbytes])
        else:
            shape, strides = (rows, length), (step, 1)
            self._memory.as_strided(shape, strides, place).copy_(data.as_strided(shape, strides))
        self._count(rows * length)


class FromSharedMemory:
    """The side of a worker."""

    def __init__(self, image: Image, path: Path) -> None:
        """Raises ConfigError where the file cannot be seen."""
        try:
            self._mapped = _Mapped(path, image.nbytes, False)
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
        return MemoryReader([self._mapped.data])

    def done(self) -> None:
        """The mapping stays for the next version."""

    def close(self) -> None:
        """Unmap the file."""
        self._mapped.close()


class _Kind:
    """Shared memory, by its name."""

    name = SharedMemory.name

    def outgoing(self, world: World, options: Mapping[str, object]) -> Transport:
        """In the folder of the refitter."""
        return SharedMemory(world, Path(str(options["folder"])))

    def incoming(self, image: Image, wants: Runs, parameters: JsonObject) -> Incoming:
        """Of the file that the trainer names."""
        return FromSharedMemory(image, Path(str(parameters.get("path"))))


register_transport(_Kind())
