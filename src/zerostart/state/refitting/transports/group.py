"""Workers on any machine: bytes go by a process group of torch.distributed that is made for the purpose.

It is over a store of its own, so that the default group of neither side is touched: gloo's, or for
``device_group`` that of the accelerators, if every rank and every worker has one to itself. Messages say
themselves where their bytes belong; they are of bounded size, and so is what a rank holds of them. A worker
puts them into a file in memory that has no name, where they lie until the trainer has decided: a transfer
that is torn never reaches a parameter. They stay there, so that a later version may come as what has changed
since; a trainer rank that is to find that out keeps what it sent in such a file, too.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zerostart.checkpoint.memory import MemoryReader
from zerostart.checkpoint.storage import Reader
from zerostart.checkpoint.strict_json import JsonObject
from zerostart.distributed.world import World, default_device, make_device_current
from zerostart.errors import ConfigError, PeerError, ReadError
from zerostart.state.refitting.changes import Blocks, Changed
from zerostart.state.refitting.image import Image
from zerostart.state.refitting.messages import MESSAGE, Message, Packer, Sender, take
from zerostart.state.refitting.transports.base import (
    Carried,
    Incoming,
    Transport,
    WorkerInfo,
    WorkerLost,
    register_transport,
    told_device,
)
from zerostart.state.refitting.transports.spool import Spool
from zerostart.transfer.planning.runs import Runs
from zerostart.transfer.writing import Writer
from zerostart.upstream.torch.process_group import backend_of_its_own, has_backend

MiB = 1 << 20
#: Most bytes of all messages that a side holds at a time.
TOGETHER = 192 * MiB
#: How long the group waits for all to join. One that dies later is noticed at once.
PATIENCE = timedelta(seconds=30)
#: Numbers of a message's header: the version, the one that its bytes are the differences from (0: it has the
#: bytes themselves), its rows, the bytes of these, how many of them are gaps (0: they are not packed), and
#: the bytes that follow the rows. No rows: it was the last one.
HEADER = 6
#: The name of the one whose messages go by the accelerators, where they can.
ON_DEVICES = "device_group"


def _join(store: Any, name: str, rank: int, size: int, device: torch.device | None) -> Any:
    """The group, when all have come: of tensors on ``device``, or of the host's."""
    made = dist.PrefixStore(name, store)  # type: ignore[attr-defined]  # public, absent from __all__
    if device is not None:
        return backend_of_its_own(device, made, rank, size, PATIENCE)
    return dist.ProcessGroupGloo(made, rank, size, PATIENCE)


class Group:
    """The side of a trainer rank."""

    def __init__(self, name: str, world: World, timeout: float, deltas: bool) -> None:
        """``timeout`` is for how many seconds a worker may take nothing before it counts as gone.

        For ``deltas`` this rank keeps what it has sent.
        """
        self.name = name
        self.note = ""
        self._device: torch.device | None = None
        self._world = world
        self._timeout = timeout
        self._deltas = deltas
        self._kept: Spool | None = None
        self._sends: list[bool] = []
        self._store: Any = None
        self._group: Any = None
        self._place: tuple[str, int, str] | None = None
        self._workers: Sequence[WorkerInfo] = ()
        self._image: Image | None = None
        self._parcels: list[_Parcel] = []
        self._lock = threading.Lock()
        self._moved = self._changed = 0

    def open(self, image: Image, own: Runs, workers: Sequence[WorkerInfo]) -> Mapping[str, JsonObject]:
        """Listen for the workers on rank 0; collective. The group is made when the first version goes."""
        self.abort()
        self._image, self._workers = image, workers
        if self.name == ON_DEVICES:
            self._device = device = self._own_device(workers)
            self.note = f" ({dist.get_default_backend_for_device(device or 'cpu')})"
        self._place = self._world.broadcast_object(self._listen, "listening for workers' messages")
        host, port, name = self._place
        sends = self._world.all_gather_object(
            [own.intersect(worker.wants).nbytes > 0 for worker in workers], "planning the messages"
        )
        self._sends = sends[self._world.rank]
        if self._deltas:
            with self._world.phase("keeping what is sent"):
                self._keep(image, own)
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
                "device": None if self._device is None else self._device.type,
            }
            for number, worker in enumerate(workers)
        }

    def writer(self, version: int, base: int | None) -> Writer:
        """Sends what each worker wants of what is written."""
        assert self._image is not None, "opened before"
        assert self._place is not None, "opened before"
        self._moved = self._changed = 0
        if self._group is None:
            host, port, name = self._place
            rank, size = self._world.rank, self._world.size + len(self._workers)
            try:
                self._store = self._store or _connected(host, port)
                self._group = _join(self._store, name, rank, size, self._device)
            except RuntimeError as error:
                absent = self._absent(name)
                names = ", ".join(absent or [worker.name for worker in self._workers])
                who = f"worker {names}" if len(absent) == 1 else f"one of the workers ({names})"
                raise WorkerLost(
                    f"no group of {size} could be made within {PATIENCE.seconds} s: {who} has died, has "
                    f"stopped, or cannot reach {host}:{port} ({_short(error)})",
                    *absent,
                ) from error
        first = self._world.size
        peers = [
            _Peer(self._group, first + n, self._timeout, self._device) for n in range(len(self._workers))
        ]
        self._parcels = [
            _Parcel(peer, worker, (version, base or 0), self._limit, self._count)
            for peer, worker, sends in zip(peers, self._workers, self._sends, strict=True)
            if sends
        ]
        packers = [(parcel.worker.wants, parcel.packer) for parcel in self._parcels]
        return Sender(
            self._image, packers, self._kept, base is not None, lambda nbytes: self._count(changed=nbytes)
        )

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

    def carried(self) -> Carried:
        """What was sent."""
        kept = 0 if self._kept is None else self._kept.runs.nbytes
        return Carried(self._moved, self._changed, kept)

    def close(self) -> None:
        """Leave the group."""
        self.abort()
        self._place = self._image = None
        if self._kept is not None:
            self._kept.close()
        self._kept = None

    def _absent(self, name: str) -> list[str]:
        """The workers that have not come to the group of this name; none where that cannot be had."""
        with contextlib.suppress(RuntimeError):
            if self._store is not None:
                first = self._world.size
                return [
                    worker.name
                    for number, worker in enumerate(self._workers)
                    if not self._store.check([_arrival(name, first + number)])
                ]
        return []

    def _keep(self, image: Image, own: Runs) -> None:
        if self._kept is not None:
            if self._kept.is_for(image.nbytes, own):
                return
            self._kept.close()
            self._kept = None
        self._kept = Spool(image.nbytes, own, "what a push has sent, which deltas are found by,")

    def _own_device(self, workers: Sequence[WorkerInfo]) -> torch.device | None:
        """This rank's accelerator, where all have one of a kind, each its own; collective."""
        device = default_device()
        told = self._world.all_gather_object(told_device(device), "looking at the accelerators")
        every = [*told, *(worker.device for worker in workers)]
        alone = len(set(every)) == len(every)  # two processes on one have no group that carries its tensors
        one_kind = len({kind for kind, _ in every}) == 1 and device.type != "cpu"
        return device if alone and one_kind and has_backend(device) else None

    def _listen(self) -> tuple[str, int, str]:
        host = socket.gethostname()
        self._store = _store(host, 0, True)
        return host, int(self._store.port), f"zerostart-{uuid.uuid4().hex}"

    def _count(self, moved: int = 0, changed: int = 0) -> None:
        with self._lock:
            self._moved += moved
            self._changed += changed


def _store(host: str, port: int, master: bool) -> Any:
    return dist.TCPStore(  # type: ignore[attr-defined]  # public in the documentation, absent from __all__
        host, port, None, master, PATIENCE, wait_for_workers=False
    )


def _connected(host: str, port: int) -> Any:
    return _store(host, port, False)


def _arrival(name: str, rank: int) -> str:
    """The key by which a worker says in the store that it has come to the group."""
    return f"{name}/has-come/{rank}"


def _leave(group: Any) -> None:
    with contextlib.suppress(RuntimeError, AttributeError):
        if group is not None:
            group.abort()


def _short(error: BaseException) -> str:
    return str(error).splitlines()[0][:200]


class _Peer:
    """Another process of the group, by its rank there."""

    def __init__(self, group: Any, rank: int, timeout: float, device: torch.device | None) -> None:
        """What goes to or comes from it goes by a tensor on ``device``, where the group wants that."""
        self._group, self._rank, self._device = group, rank, device
        self._patience = timedelta(seconds=timeout)

    def send(self, tensor: torch.Tensor) -> None:
        """Return when it has it; raises RuntimeError."""
        if self._device is not None:
            make_device_current(self._device)  # of this thread
            tensor = tensor.to(self._device)
        self._group.send([tensor], self._rank, 0).wait(self._patience)

    def receive(self, tensor: torch.Tensor) -> None:
        """Fill ``tensor``, of the host; raises RuntimeError."""
        if self._device is None:
            self._group.recv([tensor], self._rank, 0).wait(self._patience)
            return
        make_device_current(self._device)
        room = torch.empty_like(tensor, device=self._device)
        self._group.recv([room], self._rank, 0).wait(self._patience)
        tensor.copy_(room)


class _Parcel:
    """What goes to one worker."""

    def __init__(
        self,
        peer: _Peer,
        worker: WorkerInfo,
        version: tuple[int, int],
        limit: int,
        count: Callable[[int], None],
    ) -> None:
        """``version``, and the one that what is put in are the differences from, or 0."""
        self.worker = worker
        self._peer, self._count = peer, count
        self._version, self._base = version
        self.packer = Packer(limit, self._base > 0, self._send)

    def end(self) -> None:
        """Send what is left, and that no more comes."""
        self.packer.end()
        self._transmit(self._header(0, 0, 0, 0))

    def _send(self, message: Message) -> None:
        table = torch.from_numpy(message.rows.astype("<i8").reshape(-1)).view(torch.uint8)
        size = message.content.numel()
        self._transmit(self._header(len(message.rows), message.nbytes, message.gaps, size))
        self._transmit(table)
        self._transmit(message.content)
        self._count(size)

    def _header(self, rows: int, nbytes: int, gaps: int, follow: int) -> torch.Tensor:
        numbers = [self._version, self._base, rows, nbytes, gaps, follow]
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")

    def _transmit(self, tensor: torch.Tensor) -> None:
        try:
            self._peer.send(tensor)
        except RuntimeError as error:
            raise WorkerLost(
                f"worker {self.worker.name} ({self.worker.host}) died, or the network between, while version "
                f"{self._version} was sent to it ({_short(error)})",
                self.worker.name,
            ) from error


class FromGroup:
    """The side of a worker."""

    def __init__(self, image: Image, wants: Runs, parameters: JsonObject) -> None:
        """Raises WriteError where there is no room for what it ``wants``."""
        self._at = str(parameters["host"]), int(parameters["port"]), str(parameters["name"])
        self._rank, self._size = int(parameters["rank"]), int(parameters["size"])
        self._sources = [int(rank) for rank in parameters["sources"]]
        self._limit = min(MESSAGE, int(parameters["limit"]))
        self._timeout = float(parameters["timeout"])
        self._device = None if parameters.get("device") is None else default_device()
        self._group: Any = None
        self._spool = Spool(image.nbytes, wants, "what the trainer sends")
        #: The version that is in it whole.
        self._whole: int | None = None
        self._blocks = Blocks(image.nbytes)
        self._putting = threading.Lock()

    def prepare(self, version: int, check: Callable[[], None]) -> None:
        """Take all messages of the version."""
        errors: list[BaseException] = []
        base, self._whole = self._whole, None
        begun = threading.Thread(target=self._receive, args=(version, base, errors), daemon=True)
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
        self._whole = version

    def reader(self) -> Reader:
        """Of what has come."""
        return MemoryReader([self._spool.data])

    def changed(self, since: int) -> Changed:
        """By the messages that have come."""
        return self._blocks.since(since)

    def done(self) -> None:
        """The next version comes to the same place."""

    def close(self) -> None:
        """Leave the group, and give the memory back."""
        self._drop()
        self._spool.close()

    def _drop(self) -> None:
        _leave(self._group)
        self._group = None

    def _receive(self, version: int, base: int | None, errors: list[BaseException]) -> None:
        try:
            if self._group is None:
                host, port, name = self._at
                store = _connected(host, port)
                store.set(_arrival(name, self._rank), "")
                self._group = _join(store, name, self._rank, self._size, self._device)
        except RuntimeError as error:
            errors.append(PeerError(f"the trainer's group at {self._at[0]}:{self._at[1]}: {_short(error)}"))
            return
        threads = [
            threading.Thread(
                target=self._take,
                args=(
                    _Peer(self._group, source, self._timeout, self._device),
                    source,
                    version,
                    base,
                    errors,
                ),
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

    def _take(
        self, peer: _Peer, source: int, version: int, base: int | None, errors: list[BaseException]
    ) -> None:
        """All messages of one rank."""
        try:
            header = torch.empty(HEADER, dtype=torch.int64, device="cpu")
            room = torch.empty(0, dtype=torch.uint8, device="cpu")
            while not errors:
                peer.receive(header)
                number, since, rows, nbytes, gaps, size = header.tolist()
                if (
                    number != version
                    or not 0 <= rows <= 1 << 24
                    or not 0 <= gaps <= size <= nbytes <= self._limit
                    or (size < nbytes and not gaps)
                ):
                    raise ReadError(f"rank {source} sent what is no part of version {version}")
                if not rows:
                    return
                if since and since != base:
                    raise ReadError(
                        f"rank {source} sent what has changed since version {since}, and this worker has "
                        f"{'none' if base is None else f'version {base}'}"
                    )
                table = torch.empty(rows * 32, dtype=torch.uint8, device="cpu")
                peer.receive(table)
                if not since and not gaps and self._receive_in_place(peer, table, size, version):
                    continue
                if room.numel() < size:
                    room = torch.empty(size, dtype=torch.uint8, device="cpu")
                peer.receive(room[:size])
                self._put(table, room[:size], version, since, nbytes, gaps)
        except (RuntimeError, ValueError, IndexError) as error:
            errors.append(
                PeerError(f"rank {source} of the trainer died, or the network between: {_short(error)}")
            )
        except BaseException as error:
            errors.append(error)

    def _receive_in_place(self, peer: _Peer, table: torch.Tensor, size: int, version: int) -> bool:
        """Receive the bytes of one run where they belong; False: it is something else."""
        rows, memory = table.view(torch.int64).view(-1, 4), self._spool.data
        if len(rows) != 1:
            return False
        start, width, _, count = rows[0].tolist()
        if count != 1 or width != size or not 0 <= start <= memory.numel() - size:
            return False
        peer.receive(memory[start : start + size])
        self._blocks.note(start, start + size, version)
        return True

    def _put(
        self, table: torch.Tensor, content: torch.Tensor, version: int, base: int, nbytes: int, gaps: int
    ) -> None:
        message = Message(table.view(torch.int64).view(-1, 4).numpy(), nbytes, gaps, content)
        # To unpack takes memory beside the message: one at a time.
        with self._putting if gaps else contextlib.nullcontext():
            take(message, self._spool, self._blocks, version, base > 0)


class _Kind:
    """The group, by its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def outgoing(self, world: World, options: Mapping[str, object]) -> Transport:
        """Raises ConfigError where torch has no gloo."""
        if not dist.is_gloo_available():
            raise ConfigError("transport='group' needs a torch with gloo; use transport='shared_memory'")
        return Group(self.name, world, float(str(options["timeout"])), bool(options["deltas"]))

    def incoming(self, image: Image, wants: Runs, parameters: JsonObject) -> Incoming:
        """Of the group that the trainer names."""
        return FromGroup(image, wants, parameters)


register_transport(_Kind("group"))
register_transport(_Kind(ON_DEVICES))
