"""What every storage gives: names, sizes, readers of byte ranges, and the identity of its files."""

from __future__ import annotations

import contextlib
import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self

from zerostart.checkpoint.paths import scheme_of, shown_url, wait_for
from zerostart.errors import ConfigError, ReadError

#: A gap up to this many bytes is fetched from storage along with the rows, where a request costs more than
#: the bytes (65 us a request against 2 GB/s on a virtual disk; see the cost model in the documentation).
FETCHED_GAP = 128 << 10
#: The same at most, of a store however far away it is.
MOST_GAP = 8 << 20


@dataclass(frozen=True, slots=True)
class Rows:
    """Runs of bytes at equal distances."""

    #: How many runs.
    count: int
    #: Bytes of each.
    width: int
    #: Bytes from start to start.
    stride: int

    @property
    def span(self) -> int:
        """Number of bytes from the first byte of the first row to the last byte of the last."""
        return (self.count - 1) * self.stride + self.width

    def extents(self) -> Iterator[tuple[int, int]]:
        """The ranges ``(start, bytes)`` that are fetched with one request each."""
        if self.stride - self.width <= FETCHED_GAP:
            yield 0, self.span
        else:
            for row in range(self.count):
                yield row * self.stride, self.width


class Reader(ABC):
    """Reads byte ranges of a storage for a load. Several threads share one; it is closed at the end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close what is open."""
        return  # not abstract: most have nothing to close

    @abstractmethod
    def read(self, file: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill ``buffers``, one after the other, from byte ``offset`` of file number ``file`` on.

        Raises ReadError, naming the file, where not all of these bytes can be had, or the file is not the
        one that was opened any more.
        """

    def gather(self, file: int, offset: int, rows: Rows, target: memoryview, step: int) -> None:
        """Read rows from ``offset`` of file number ``file`` on into ``target``, ``step`` bytes apart.

        Raises ReadError as ``read`` does.
        """
        # One request for each row; a reader that can take several at once has its own way.
        for row in range(rows.count):
            self.read(file, offset + row * rows.stride, [target[row * step : row * step + rows.width]])

    def announce(self, file: int, offset: int, rows: Rows) -> None:
        """Say what a later call will read, which may be fetched ahead."""
        return  # not abstract: most have no use for it

    def note(self) -> str:
        """Describe how reading went, in a few words for a person."""
        return ""


class HeaderBytes(Protocol):
    """One file of a storage, as the readers of headers want it."""

    def read(self, length: int, offset: int) -> bytes:
        """Read ``length`` bytes from ``offset`` on, fewer only at the end of the file; raises ReadError."""
        ...


#: Opens the file of a name (and of a kind, in words) for its header: its bytes, and how many there are.
Opener = Callable[[str, str], AbstractContextManager[tuple[HeaderBytes, int]]]


@dataclass(frozen=True, slots=True)
class RequestCost:
    """Seconds until the first byte of a request, and bytes a second from then on."""

    latency: float
    rate: float

    @property
    def gap(self) -> int:
        """The bytes that come in the time of a further request: up to so many are rather read through."""
        return max(FETCHED_GAP, min(MOST_GAP, int(self.latency * self.rate)))


@dataclass(frozen=True)
class Residency:
    """How far bytes are from this machine, for choosing how they are read."""

    #: In a word, what they lie on.
    kind: str = ""
    #: Share of them in this machine's memory, from 0 to 1; None where nobody knows.
    resident: float | None = 1.0
    #: Whether all clients of the storage share what it gives in a second.
    remote: bool = False
    #: Whether reads that go round the page cache may pay.
    direct: bool = False
    #: Requests that a rank should have in flight; 0 leaves it to what suits a disk or a file system.
    depth: int = 0
    #: Bytes that a reader takes for each of its threads beside what it fills.
    buffer: int = 0


@dataclass(frozen=True)
class Storage(ABC):
    """Where the bytes of a catalog's files lie; plain data that travels from rank to rank."""

    #: Their names.
    files: tuple[str, ...]
    #: Their lengths in bytes.
    sizes: tuple[int, ...]
    #: What ``identity`` gave for each when it was opened; () where nobody has asked.
    identities: tuple[Hashable, ...] = field(default=(), compare=False, repr=False)
    #: URL of the directory that the files lie in, where not all of them are the checkpoint: which are, the
    #: rules for a local directory say, and ``named`` gives them.
    folder: str = field(default="", kw_only=True)
    #: The one of them that the source names; empty where it names the directory.
    asked: str = field(default="", kw_only=True)
    #: What a request takes; None where reads are no requests to a server.
    cost: RequestCost | None = field(default=None, compare=False, repr=False, kw_only=True)

    #: Of URLs that lead to such a storage; for those that are registered.
    schemes: ClassVar[tuple[str, ...]] = ()
    #: Whether bytes that several ranks want may better be read by one of them and sent to the others.
    worth_exchanging: ClassVar[bool] = True
    #: Whether what one rank of a machine has read comes from memory for the others (its page cache).
    cached: ClassVar[bool] = True

    @classmethod
    def at(cls, source: str) -> Storage:
        """Return the storage at a URL, with its files in order; one rank calls it.

        Raises CheckpointNotFoundError if nothing is there, ReadError if asking fails.
        """
        raise NotImplementedError(f"{cls.__name__} is not reached by a URL")

    @abstractmethod
    def reader(self, *, cold: bool = False, direct: bool = False) -> Reader:
        """Make a reader for one load. ``cold`` and ``direct`` say how to read, see ``Residency``."""

    @property
    def nbytes(self) -> int:
        """Total size of the files in bytes."""
        return sum(self.sizes)

    @property
    def name(self) -> str:
        """What to call it in messages, where the user gave no path or URL."""
        return self.files[0] if len(self.files) == 1 else f"{self.files[0]} and {len(self.files) - 1} more"

    @property
    def gap(self) -> int:
        """A gap up to this many bytes is fetched along with the rows around it."""
        return FETCHED_GAP if self.cost is None else self.cost.gap

    def names(self) -> tuple[str, ...]:
        """The names of the files in ``folder``."""
        return tuple(file.removeprefix(f"{self.folder}/") for file in self.files)

    def named(self, names: Sequence[str]) -> Storage:
        """The files of these names in ``folder``, in this order, as they are now.

        Raises CheckpointNotFoundError for one that is not there, ReadError if asking fails.
        """
        raise NotImplementedError(f"{type(self).__name__} has no directories")

    def directory(self) -> Storage:
        """All files of ``folder``, as they are now. Raises ReadError."""
        raise NotImplementedError(f"{type(self).__name__} has no directories")

    def measured(self) -> Storage:
        """The same with ``cost``, as it is found to be by a few requests. Raises ReadError."""
        return self

    def residency(self) -> Residency:
        """How far the bytes are from this machine; looks at a few files, and reads none."""
        return Residency(kind=self.schemes[0] if self.schemes else "", resident=None, remote=True)

    def identity(self, file: int) -> Hashable:
        """A value that identifies file number ``file``, and changes when its contents do.

        None if it is not there any more. By default nothing but the length that is known.
        """
        return self.sizes[file]

    def kept(self, used: Iterable[int] = ()) -> Storage:
        """Return what is needed after the load to read the files ``used`` again, with nothing open."""
        # Only of these files: to ask may cost a request each.
        wanted = set(used)
        marks = self.identities or tuple(
            self.identity(n) if n in wanted else None for n in range(len(self.files))
        )
        return replace(self, identities=tuple(m if n in wanted else None for n, m in enumerate(marks)))

    def recalled(self, purpose: str) -> Storage:
        """Check that the files are unchanged. Raises ReadError, which ends with ``purpose``."""
        for number, before in enumerate(self.identities):
            if before is not None and (now := self.identity(number)) != before:
                raise ReadError(
                    f"{self.files[number]} was changed since the model was loaded "
                    f"(it {self.changed(before, now)}), {purpose}"
                )
        return self

    def changed(self, before: Hashable, now: Hashable) -> str:
        """Say in words what happened to a file whose identity was ``before``."""
        return "was removed" if now is None else "was replaced or written to"

    @contextlib.contextmanager
    def opened(self, number: int) -> Iterator[tuple[HeaderBytes, int]]:
        """Open file ``number`` to read its header: its bytes, and its size."""
        with self.reader() as reader:
            yield _Ranges(reader, number, self.sizes[number]), self.sizes[number]


class _Ranges:
    """The bytes of one file, by a reader."""

    def __init__(self, reader: Reader, file: int, size: int) -> None:
        self._reader, self._file, self._size = reader, file, size

    def read(self, length: int, offset: int) -> bytes:
        buffer = bytearray(max(0, min(length, self._size - offset)))
        if buffer:
            self._reader.read(self._file, offset, [memoryview(buffer)])
        return bytes(buffer)


#: Of zerostart's own: by scheme, where the class is. A storage that is registered goes before them.
_OWN = dict.fromkeys(
    ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "http", "https"),
    ("zerostart.checkpoint.storage.object_store", "ObjectFiles"),
)
#: Entry points of other packages: a scheme, and the subclass of ``Storage``.
GROUP = "zerostart.storages"
_registered: dict[str, type[Storage]] = {}


def register_storage(kind: type[Storage]) -> type[Storage]:
    """Register ``kind`` for URLs with one of ``kind.schemes``, in this process; also a decorator.

    Raises ConfigError for a scheme that another storage has, and for a class without an ``at`` of its own.
    """
    if not kind.schemes:
        raise ConfigError(f"{kind.__name__} has no URL schemes; set schemes, a tuple of names")
    schemes = [scheme.lower() for scheme in kind.schemes]
    for scheme in schemes:
        # The same package may register its class in this process as well as by its entry point.
        installed = _installed().get(scheme)
        others = installed and installed.module.partition(".")[0] != kind.__module__.partition(".")[0]
        if others or _registered.get(scheme, kind) is not kind:
            raise ConfigError(f"a storage for {scheme}:// is already registered; choose another scheme")
    _check_reached(kind)
    _registered.update(dict.fromkeys(schemes, kind))
    return kind


def storage_at(source: object) -> Storage | None:
    """Return the storage at a URL; None for no URL. Raises ConfigError for an unknown scheme."""
    kind = _kind_of(source)
    if kind is None:
        return None
    wait_for(str(source))  # a save of this process may still be publishing it in the background
    return kind.at(str(source))


def _kind_of(source: object) -> type[Storage] | None:
    scheme = scheme_of(source)
    if not scheme:
        return None
    kind: type[Storage]
    if scheme in _registered:
        kind = _registered[scheme]
    elif scheme in _installed():
        # Imported only now: a package whose storage nobody uses costs nothing.
        kind = _installed()[scheme].load()
        _check_reached(kind)
    elif scheme in _OWN:
        module, name = _OWN[scheme]
        kind = getattr(importlib.import_module(module), name)
    else:
        known = sorted({*_registered, *_installed(), *_OWN})
        raise ConfigError(
            f"{shown_url(str(source))}: nothing reads {scheme}:// here; copy the files to a local directory, "
            "register a storage of that scheme (zerostart.checkpoint.storage.register_storage), or use "
            f"{', '.join(known)}"
        )
    return kind


def _check_reached(kind: type[Storage]) -> None:
    if getattr(kind.at, "__func__", None) is Storage.at.__func__:  # type: ignore[attr-defined]
        raise ConfigError(
            f"{kind.__name__} does not say what lies at a URL; give it a class method at(source)"
        )


@functools.cache
def _installed() -> dict[str, Any]:
    return {point.name.lower(): point for point in entry_points(group=GROUP)}
