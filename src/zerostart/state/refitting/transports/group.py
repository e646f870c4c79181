"""Workers on any machine: bytes go by a process group of torch.distributed that is made for the purpose.

It is gloo's, over a store of its own, so that the default group of neither side is touched. Messages say
themselves where their bytes belong; they are of bounded size, and so is what a rank holds of them. A worker
puts them into a file in memory that has no name, where they lie until the trainer has decided: a transfer
that is torn never reaches a parameter.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import tempfile
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from zerostart.checkpoint.memory import MemoryReader
from zerostart.checkpoint.storage import Reader
from zerostart.checkpoint.strict_json import JsonObject
from zerostart.distributed.world import World
from zerostart.errors import CheckpointError, ConfigError, PeerError, ReadError, WriteError
from zerostart.state.refitting.image import Image
from zerostart.state.refitting.transports.base import (
    ImageWriter,
    Incoming,
    Transport,
    WorkerInfo,
    WorkerLost,
    register_transport,
)
from zerostart.transfer.planning.runs import Runs
from zerostart.transfer.writing import Writer

MiB = 1 << 20
#: Most bytes of a message, and of all messages that a side holds at a time.
MESSAGE, TOGETHER = 32 * MiB, 192 * MiB
#: How long the group waits for all to join. One that dies later is noticed at once.
PATIENCE = timedelta(seconds=30)
#: Numbers of a message's header: the version, its rows, and its bytes. No rows: it was the last one.
HEADER = 3


def _join(store: Any, name: str, rank: int, size: int) -> Any:
    """The group, when all have come."""
    made = dist.PrefixStore(name, store)  # type: ignore[attr-defined]  # public, absent from __all__
    return dist.ProcessGroupGloo(made, rank, size, PATIENCE)


class Group:
    """The side of a trainer rank."""

    name = "group"

    def __init__(self, world: World, timeout: float) -> None:
        """``timeout`` is for how many seconds a worker may take nothing before it counts as gone."""
        self._world = world
        self._timeout = timeout
        self._store: Any = None
        self._group: Any = None
        self._place: tuple[str, int, str] | None = None
        self._workers: Sequence[WorkerInfo] = ()
        self._image: Image | None = None
        self._parcels: list[_Parcel] = []
        self._lock = threading.Lock()
        self._moved = 0

    def open(self, image: Image, own: Runs, workers: Sequence[WorkerInfo]) -> Mapping[str, JsonObject]:
        """Listen for the workers on rank 0; collective. The group is made when the first version goes."""
        self.abort()
        self._image, self._workers = image, workers
        self._place = self._world.broadcast_object(self._listen, "listening for workers' messages")
        host, port, name = self._place
        sends = self._world.all_gather_object(
            [own.intersect(worker.wants).nbytes > 0 for worker in workers], "planning the messages"
        )
        size = self._world.size + len(workers)
        most = max([1, len(workers), *(sum(each) for each in zip(*sends, strict=True))])
        self._limit = min(MESSAGE, TOGETHER // most)
        return {
            worker.name: {
                "host": host,
                "port": port,
                "name": name,
                "rank": self._world.size + number,
                "size": size,
                "sources": [rank for rank, each in enumerate(sends) if each[number]],
                "limit": self._limit,
                "timeout": self._timeout,
            }
            for number, worker in enumerate(workers)
        }

    def writer(self, version: int) -> Writer:
        """Sends what each worker wants of what is written."""
        assert self._image is not None, "opened before"
        assert self._place is not None, "opened before"
        self._moved = 0
        if self._group is None:
            host, port, name = self._place
            rank, size = self._world.rank, self._world.size + len(self._workers)
            try:
                store = self._store or _connected(host, port)
                self._group = _join(store, name, rank, size)
            except RuntimeError as error:
                names = ", ".join(worker.name for worker in self._workers)
                raise WorkerLost(
                    f"no group of {size} could be made within {PATIENCE.seconds} s: one of the workers "
                    f"({names}) has died, or cannot reach {host}:{port} ({_short(error)})"
                ) from error
        first = self._world.size
        peers = [_Peer(self._group, first + n, self._timeout) for n in range(len(self._workers))]
        self._parcels = [
            _Parcel(peer, worker, version, self._limit, self._count)
            for peer, worker in zip(peers, self._workers, strict=True)
        ]
        return _Sender(self._image, self._parcels)

    def finish(self) -> None:
        """Send what is left, and that it is all."""
        for parcel in self._parcels:
            parcel.end()
        self._parcels = []

    def abort(self) -> None:
        """Leave the group, which workers notice."""
        self._parcels = []
        _leave(self._group)
        self._group = self._store = None

    def moved(self) -> int:
        """Bytes that were sent."""
        return self._moved

    def close(self) -> None:
        """Leave the group."""
        self.abort()
        self._place = self._image = None

    def _listen(self) -> tuple[str, int, str]:
        host = socket.gethostname()
        self._store = _store(host, 0, True)
        return host, int(self._store.port), f"zerostart-{uuid.uuid4().hex}"

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._moved += nbytes


def _store(host: str, port: int, master: bool) -> Any:
    return dist.TCPStore(  # type: ignore[attr-defined]  # public in the documentation, absent from __all__
        host, port, None, master, PATIENCE, wait_for_workers=False
    )


def _connected(host: str, port: int) -> Any:
    return _store(host, port, False)


def _leave(group: Any) -> None:
    with contextlib.suppress(RuntimeError, AttributeError):
        if group is not None:
            group.abort()


def _short(error: BaseException) -> str:
    return str(error).splitlines()[0][:200]


class _Peer:
    """Another process of the group, by its rank there."""

    def __init__(self, group: Any, rank: int, timeout: float) -> None:
        self._group, self._rank = group, rank
        self._patience = timedelta(seconds=timeout)

    def send(self, tensor: torch.Tensor) -> None:
        """Return when it has it; raises RuntimeError."""
        self._group.send([tensor], self._rank, 0).wait(self._patience)

    def receive(self, tensor: torch.Tensor) -> None:
        """Fill ``tensor``; raises RuntimeError."""
        self._group.recv([tensor], self._rank, 0).wait(self._patience)


class _Parcel:
    """What goes to one worker next; several threads put something in."""

    def __init__(
        self,
        peer: _Peer,
        worker: WorkerInfo,
        version: int,
        limit: int,
        count: Callable[[int], None],
    ) -> None:
        self.worker = worker
        self._peer, self._version, self._limit, self._count = peer, version, limit, count
        self._lock = threading.Lock()
        self._room: torch.Tensor | None = None
        self._rows: list[Any] = []
        self._filled = 0
        self._sent = False

    def put(self, met: Runs, source: torch.Tensor, place: int) -> None:
        """Those bytes of ``met``, where ``source`` begins at byte ``place`` of the image."""
        with self._lock:
            for part in met.batches(self._limit):
                if self._filled + part.nbytes > self._limit:
                    self._send()
                if self._room is None:
                    self._room = torch.empty(self._limit, dtype=torch.uint8, device="cpu")
                for start, width, stride, count in part.rows.tolist():
                    nbytes = width * count
                    self._room[self._filled : self._filled + nbytes].view(count, width).copy_(
                        source.as_strided((count, width), (stride or width, 1), start - place)
                    )
                    self._filled += nbytes
                self._rows.append(part.rows)

    def end(self) -> None:
        """Send what is left, and that no more comes."""
        with self._lock:
            if self._filled:
                self._send()
            if self._sent:
                self._transmit(torch.tensor([self._version, 0, 0], dtype=torch.int64, device="cpu"))
            self._room = None

    def _send(self) -> None:
        assert self._room is not None, "something was put in"
        rows = np.concatenate(self._rows).astype("<i8")
        table = torch.from_numpy(rows.reshape(-1).copy()).view(torch.uint8)
        header = [self._version, len(rows), self._filled + table.numel()]
        self._transmit(torch.tensor(header, dtype=torch.int64, device="cpu"))
        self._transmit(table)
        self._transmit(self._room[: self._filled])
        self._count(self._filled)
        self._sent, self._filled, self._rows = True, 0, []

    def _transmit(self, tensor: torch.Tensor) -> None:
        try:
            self._peer.send(tensor)
        except RuntimeError as error:
            raise WorkerLost(
                f"worker {self.worker.name} ({self.worker.host}) died, or the network between, while version "
                f"{self._version} was sent to it ({_short(error)})"
            ) from error


class _Sender(ImageWriter):
    """What is written, to the workers that want it."""

    def __init__(self, image: Image, parcels: Sequence[_Parcel]) -> None:
        super().__init__(image.layout)
        self._parcels = parcels

    def put(self, place: int, data: torch.Tensor, length: int, step: int, rows: int) -> None:
        """Put it into the parcels; full ones are sent meanwhile."""
        written = Runs.of([(place, length, step, rows)])
        for parcel in self._parcels:
            met = written.intersect(parcel.worker.wants)
            if met.nbytes:
                parcel.put(met, data, place)


def _pages(wants: Runs, nbytes: int) -> list[tuple[int, int]]:
    """Begin and end of the pages with any of the bytes, in a file of ``nbytes``; those that touch are one."""
    low = wants.spans[:, 0] // mmap.PAGESIZE * mmap.PAGESIZE
    high = -(-wants.spans[:, 1] // mmap.PAGESIZE) * mmap.PAGESIZE
    rows = np.stack([low, high - low, np.zeros_like(low), np.ones_like(low)], 1)
    return [(begin, min(end, nbytes)) for begin, end in Runs.of(rows).spans.tolist()]


class FromGroup:
    """The side of a worker."""

    def __init__(self, image: Image, wants: Runs, parameters: JsonObject) -> None:
        """Raises WriteError where there is no room for what it ``wants``."""
        self._at = str(parameters["host"]), int(parameters["port"]), str(parameters["name"])
        self._rank, self._size = int(parameters["rank"]), int(parameters["size"])
        self._sources = [int(rank) for rank in parameters["sources"]]
        self._limit = min(MESSAGE, int(parameters["limit"]))
        self._timeout = float(parameters["timeout"])
        self._group: Any = None
        folder = os.environ.get("ZEROSTART_REFIT_SPOOL") or "/dev/shm"
        try:
            # Without a name: it goes with this process, however that ends.
            with tempfile.TemporaryFile(dir=folder) as file:
                os.ftruncate(file.fileno(), image.nbytes)
                # Its own pages alone, and at once: one that is missing later would end the process.
                for begin, end in _pages(wants, image.nbytes):
                    os.posix_fallocate(file.fileno(), begin, end - begin)
                self._memory = mmap.mmap(file.fileno(), image.nbytes)
        except OSError as error:
            raise WriteError(
                f"{folder}: {wants.nbytes} bytes for what the trainer sends cannot be had there "
                f"({error.strerror}); name another directory in ZEROSTART_REFIT_SPOOL"
            ) from error
        self._data = torch.frombuffer(self._memory, dtype=torch.uint8)

    def prepare(self, version: int, check: Callable[[], None]) -> None:
        """Take all messages of the version."""
        errors: list[BaseException] = []
        begun = threading.Thread(target=self._receive, args=(version, errors), daemon=True)
        begun.start()
        try:
            while begun.is_alive():
                begun.join(0.5)
                check()
        except BaseException:
            # Whoever still waits for a message is in a group that the trainer has left, too.
            self._drop()
            raise
        if errors:
            self._drop()
            raise errors[0]

    def reader(self) -> Reader:
        """Of what has come."""
        return MemoryReader([self._data])

    def done(self) -> None:
        """The next version comes to the same place."""

    def close(self) -> None:
        """Leave the group, and give the memory back."""
        self._drop()
        self._data = torch.empty(0, dtype=torch.uint8, device="cpu")
        with contextlib.suppress(BufferError):  # somebody still reads: it goes with the last reference
            self._memory.close()

    def _drop(self) -> None:
        _leave(self._group)
        self._group = None

    def _receive(self, version: int, errors: list[BaseException]) -> None:
        try:
            if self._group is None:
                host, port, name = self._at
                self._group = _join(_connected(host, port), name, self._rank, self._size)
        except RuntimeError as error:
            errors.append(PeerError(f"the trainer's group at {self._at[0]}:{self._at[1]}: {_short(error)}"))
            return
        threads = [
            threading.Thread(
                target=self._take,
                args=(_Peer(self._group, source, self._timeout), source, version, errors),
                daemon=True,
            )
            for source in self._sources
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            # After an error of one the others may wait for long: their connections are given up.
            while thread.is_alive() and not errors:
                thread.join(0.1)

    def _take(self, peer: _Peer, source: int, version: int, errors: list[BaseException]) -> None:
        """All messages of one rank."""
        try:
            header = torch.empty(HEADER, dtype=torch.int64, device="cpu")
            room = torch.empty(0, dtype=torch.uint8, device="cpu")
            while not errors:
                peer.receive(header)
                number, rows, nbytes = header.tolist()
                size = nbytes - rows * 32
                if number != version or not 0 <= rows <= 1 << 24 or not 0 <= size <= self._limit:
                    raise ReadError(f"rank {source} sent what is no part of version {version}")
                if not rows:
                    return
                table = torch.empty(rows * 32, dtype=torch.uint8, device="cpu")
                peer.receive(table)
                if room.numel() < size:
                    room = torch.empty(size, dtype=torch.uint8, device="cpu")
                peer.receive(room[:size])
                self._put(table, room[:size])
        except (RuntimeError, CheckpointError) as error:
            errors.append(
                PeerError(f"rank {source} of the trainer died, or the network between: {_short(error)}")
            )
        except BaseException as error:
            errors.append(error)

    def _put(self, table: torch.Tensor, packed: torch.Tensor) -> None:
        done = 0
        # Row by row in the order in which they were packed; a place beyond the image is refused by torch.
        for start, width, stride, count in table.view(torch.int64).view(-1, 4).tolist():
            nbytes = width * count
            self._data.as_strided((count, width), (stride or width, 1), start).copy_(
                packed[done : done + nbytes].view(count, width)
            )
            done += nbytes


class _Kind:
    """The group, by its name."""

    name = Group.name

    def outgoing(self, world: World, options: Mapping[str, object]) -> Transport:
        """Raises ConfigError where torch has no gloo."""
        if not dist.is_gloo_available():
            raise ConfigError("transport='group' needs a torch with gloo; use transport='shared_memory'")
        return Group(world, float(str(options["timeout"])))

    def incoming(self, image: Image, wants: Runs, parameters: JsonObject) -> Incoming:
        """Of the group that the trainer names."""
        return FromGroup(image, wants, parameters)


register_transport(_Kind())
