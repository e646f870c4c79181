"""What a transport is: the trainer's side, the workers' side, and the register of both by name.

To push a version the session tells each worker to prepare; meanwhile every trainer rank writes its own
elements of the image to ``Transport.writer`` and calls ``finish``; a worker's ``Incoming.prepare`` returns
when the bytes that it wants can be read. Nothing has touched a parameter until then. Then the session
decides, and workers fill their parameters from ``Incoming.reader``, and call ``done``.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import NamedTuple, Protocol

import torch

from zerostart.checkpoint.storage import Reader
from zerostart.checkpoint.strict_json import JsonObject
from zerostart.checkpoint.write.shards import SaveLayout
from zerostart.distributed.world import World
from zerostart.errors import ConfigError, PeerError, WriteError
from zerostart.state.refitting.changes import Changed
from zerostart.state.refitting.image import Image
from zerostart.transfer.planning.runs import Runs
from zerostart.transfer.writing import Writer


class Closed(PeerError):
    """The trainer has said that no further version comes."""


class WorkerLost(WriteError):
    """A worker cannot be sent to any more.

    What a transport raises in a phase of the ranks, which are all there, and of which one has noticed it; all
    ranks raise it then, and ``push`` a PeerError for it.
    """

    def __init__(self, text: str, *workers: str) -> None:
        """``workers`` are the names of those that it may be; none: any may."""
        super().__init__(text)
        self.workers = workers


@dataclass(frozen=True)
class WorkerInfo:
    """A worker that takes part in the next pushes; the same on all trainer ranks."""

    #: Its place among the workers, from 0 on.
    number: int
    name: str
    #: What its machine calls itself.
    host: str
    #: What it reads of the image.
    wants: Runs
    #: Kind of the device that its tensors are on, and what tells that from all others.
    device: tuple[str, str] = ("cpu", "")


def told_device(device: torch.device) -> tuple[str, str]:
    """What a process tells others of its device: the kind, and what tells it from all others."""
    if device.type == "cpu":
        return "cpu", ""
    number = device.index or 0
    asked = getattr(torch.get_device_module(device), "get_device_properties", None)
    own = None if asked is None else getattr(asked(number), "uuid", None)
    return device.type, f"{socket.gethostname()}-{number if own is None else own}"


class Carried(NamedTuple):
    """What a trainer rank has done for the last version, in bytes."""

    #: Put into the transport.
    moved: int
    #: That differ from those of the version before; all, where this was not looked at.
    changed: int
    #: Kept to find out, beside the shards.
    kept: int = 0


class ImageWriter(ABC):
    """A ``Writer`` whose rows go to places of the image, and to no file."""

    def __init__(self, layout: SaveLayout) -> None:
        self._tensors = layout.tensors

    def lead(self, name: str, offset: int) -> int:
        """Where in a page it begins means nothing here."""
        return 0

    def goes_round(self, nbytes: int) -> bool:
        """There is no page cache to go round."""
        return False

    def write_rows(self, name: str, data: memoryview, offset: int, length: int, step: int, rows: int) -> None:
        """See ``Writer``."""
        place = self._tensors[name].offset + offset
        self.put(place, torch.frombuffer(data, dtype=torch.uint8), length, step if rows > 1 else length, rows)

    @abstractmethod
    def put(self, place: int, data: torch.Tensor, length: int, step: int, rows: int) -> None:
        """Take ``rows`` of ``length`` bytes, ``step`` bytes apart in ``data`` and in the image.

        The first begins at byte ``place`` of the image. Called from several threads.
        """


class Transport(Protocol):
    """The side of one trainer rank. What is collective is called by all trainer ranks in one order."""

    #: Under which it is registered.
    name: str
    #: What a report says of it behind the name, if anything.
    note: str

    def open(self, image: Image, own: Runs, workers: Sequence[WorkerInfo]) -> Mapping[str, JsonObject]:
        """Make ready for pushes of ``image``, of which this rank writes ``own``; collective.

        Called again whenever the image or the workers have changed. What it gives on rank 0 each worker is
        told, by its name: the ``parameters`` of its ``Incoming``.
        """
        ...

    def writer(self, version: int, base: int | None) -> Writer:
        """Where this rank's elements of the version go, by ``transfer.writing.write_out``.

        All workers have version ``base`` whole, so that what has changed since is enough; None: send all.
        """
        ...

    def finish(self) -> None:
        """Return when all that this rank has written has left it; every rank calls it inside a phase."""
        ...

    def abort(self) -> None:
        """Give up the version that is under way, and raise nothing; workers must not wait for more of it."""
        ...

    def carried(self) -> Carried:
        """What this rank has put into the transport for the last version."""
        ...

    def close(self) -> None:
        """Remove and release everything; raises nothing."""
        ...


class Incoming(Protocol):
    """The side of one worker."""

    def prepare(self, version: int, check: Callable[[], None]) -> None:
        """Return when the version's bytes can be read, or will be able to once the session has decided.

        While it waits it calls ``check`` every second at least, which raises where the push was given up or
        the trainer is gone. Raises ReadError, PeerError.
        """
        ...

    def reader(self) -> Reader:
        """Reads the image's bytes, as file number 0; a new one for each pass. Only what the worker wants."""
        ...

    def changed(self, since: int) -> Changed | None:
        """What may differ from version ``since``, which it has given, too; None: nobody has looked."""
        ...

    def done(self) -> None:
        """The version is in the parameters, or given up: its bytes are not needed any more."""
        ...

    def close(self) -> None:
        """Release everything; raises nothing."""
        ...


class Kind(Protocol):
    """A transport by its name: makes both sides."""

    #: What it is asked for by.
    name: str

    def outgoing(self, world: World, options: Mapping[str, object]) -> Transport:
        """The side of this trainer rank; raises ConfigError where it cannot be.

        ``options``: ``folder``, of this job on rank 0's machine, ``timeout`` in seconds, and ``deltas``:
        whether ``base`` of ``Transport.writer`` will ever be a version.
        """
        ...

    def incoming(self, image: Image, wants: Runs, parameters: JsonObject) -> Incoming:
        """The side of a worker, with what ``Transport.open`` had for it."""
        ...


#: Modules of this folder that register one each.
BUILT_IN = ("shared_memory", "group")
#: By name of a transport that people ask for, and that is not built: the package that one would need.
NOT_BUILT = {"nixl": "nixl", "mooncake": "mooncake-transfer-engine"}
#: Entry points of installed packages: under a transport's name the object to register.
GROUP = "zerostart.transports"
_kinds: dict[str, Kind] = {}


def register_transport(kind: Kind) -> Kind:
    """Register a transport in this process, trainer's or worker's, under ``kind.name``.

    Raises ConfigError where another one has the name.
    """
    if _kinds.setdefault(kind.name, kind) is not kind:
        raise ConfigError(f"a transport {kind.name!r} is already registered; choose another name")
    return kind


def transport_kind(name: str) -> Kind:
    """The transport ``name``; raises ConfigError where none is registered or installed."""
    # Those that come with zerostart register themselves.
    for module in BUILT_IN:
        import_module(f"zerostart.state.refitting.transports.{module}")
    if name not in _kinds:
        for point in entry_points(group=GROUP, name=name):
            register_transport(point.load())
    if (kind := _kinds.get(name)) is not None:
        return kind
    needs = NOT_BUILT.get(name)
    raise ConfigError(
        f"transport={name!r} is not one of {', '.join(sorted(_kinds))}; one of your own is registered with "
        f"zerostart.serving.register_transport, on both sides, or is an entry point of {GROUP}"
        + (f", and for this one would be built on the package {needs}" if needs else "")
    )
