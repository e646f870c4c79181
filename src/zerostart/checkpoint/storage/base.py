"""Storage protocol: file names, sizes, readers of byte ranges, and identities of files."""

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

#: Maximum gap between rows that one request also reads, in bytes, since another request would cost more (65
#: us a request against 2 GB/s on a virtual disk).
FETCHED_GAP = 128 << 10
#: Maximum of this gap for object stores, in bytes.
MOST_GAP = 8 << 20


@dataclass(frozen=True, slots=True)
class Rows:
    """Equally spaced byte ranges of equal size."""

    #: Number of rows.
    count: int
    #: Bytes of one row.
    width: int
    #: Bytes from the start of one row to the start of the next.
    stride: int

    @property
    def span(self) -> int:
        """Bytes from the start of the first row to the end of the last."""
        return (self.count - 1) * self.stride + self.width


class Reader(ABC):
    """Reader of byte ranges for one load.

    Threads share a reader, which is closed at the end of the load.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return  # not abstract: most readers have nothing to close

    @abstractmethod
    def read(self, file: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill ``buffers`` from byte ``offset`` of a file.

        Raises ReadError with the name of the file if bytes are missing or the file was replaced.
        """

    def gather(self, file: int, offset: int, rows: Rows, target: memoryview, step: int) -> None:
        """Read rows into ``target``, ``step`` bytes apart.

        They begin at ``offset`` of file number ``file``. Raises ReadError as ``read`` does.
        """
        # One request for each row; some readers override this with a faster way.
        for row in range(rows.count):
            self.read(file, offset + row * rows.stride, [target[row * step : row * step + rows.width]])

    def announce(self, file: int, offset: int, rows: Rows) -> None:
        """Announce a later read, so that the reader can prefetch it."""
        return  # most readers do not prefetch

    def describe_reads(self) -> str:
        """Describe for a report how bytes were read, or return an empty string."""
        return ""


class HeaderBytes(Protocol):
    """Open file of a storage, for readers of headers."""

    def read(self, length: int, offset: int) -> bytes:
        """Read ``length`` bytes; fewer only at the end.

        Raises ReadError.
        """
        ...


#: Function that opens the header of a file (name, kind in words): its bytes and its size.
Opener = Callable[[str, str], AbstractContextManager[tuple[HeaderBytes, int]]]


@dataclass(frozen=True, slots=True)
class RequestCost:
    """Latency in seconds and rate in bytes per second."""

    latency: float
    rate: float

    @property
    def gap(self) -> int:
        """Maximum gap that is cheaper to read than another request, in bytes."""
        return max(FETCHED_GAP, min(MOST_GAP, int(self.latency * self.rate)))


@dataclass(frozen=True)
class Residency:
    """Distance of the bytes from this machine."""

    #: Short name of the file system or store.
    kind: str = ""
    #: Share of the bytes in this machine's memory, from 0 to 1; None if unknown.
    resident: float | None = 1.0
    #: True if all clients share the bandwidth of the storage.
    remote: bool = False
    #: True if reads that bypass the page cache may be faster.
    direct: bool = False
    #: Concurrent requests of a rank; 0 for the default of disks and file systems.
    depth: int = 0
    #: Memory of a reader for each of its threads, in addition to its buffers, in bytes.
    buffer: int = 0


@dataclass(frozen=True)
class Storage(ABC):
    """Files of a catalog, as plain data."""

    #: File names.
    files: tuple[str, ...]
    #: File sizes in bytes.
    sizes: tuple[int, ...]
    #: Result of ``identity`` for each file when it was opened; () if unknown.
    identities: tuple[Hashable, ...] = field(default=(), compare=False, repr=False)
    #: URL of the directory of the files. If set, only some files are the checkpoint; ``named`` selects them.
    folder: str = field(default="", kw_only=True)
    #: File that the caller's source names; empty if it names the directory.
    asked: str = field(default="", kw_only=True)
    #: Cost of a request to a server; None for local files.
    cost: RequestCost | None = field(default=None, compare=False, repr=False, kw_only=True)

    #: URL schemes of a registered storage.
    schemes: ClassVar[tuple[str, ...]] = ()
    #: True if one rank should read the bytes that several ranks need, and send them.
    worth_exchanging: ClassVar[bool] = True
    #: True if the page cache serves bytes that another rank of the machine has read.
    cached: ClassVar[bool] = True

    @classmethod
    def at(cls, source: str) -> Storage:
        """Open the storage at a URL.

        One rank calls it. Raises CheckpointNotFoundError if nothing is there, ReadError if a request
        fails.
        """
        raise NotImplementedError(f"{cls.__name__} cannot be opened by a URL")

    @abstractmethod
    def reader(self, *, cold: bool = False, direct: bool = False) -> Reader:
        """Create a reader for one load; see ``Residency``."""

    @property
    def nbytes(self) -> int:
        """Total size of the files in bytes."""
        return sum(self.sizes)

    @property
    def name(self) -> str:
        """Name for messages without a path or URL."""
        return self.files[0] if len(self.files) == 1 else f"{self.files[0]} and {len(self.files) - 1} more"

    @property
    def gap(self) -> int:
        """Maximum gap between rows that one request also reads, in bytes."""
        return FETCHED_GAP if self.cost is None else self.cost.gap

    def names(self) -> tuple[str, ...]:
        """Return the names of the files in ``folder``."""
        return tuple(file.removeprefix(f"{self.folder}/") for file in self.files)

    def named(self, names: Sequence[str]) -> Storage:
        """Return the named files in ``folder``.

        They are in the given order, with their current sizes. Raises CheckpointNotFoundError for a
        missing file, ReadError if a request fails.
        """
        raise NotImplementedError(f"{type(self).__name__} has no directories")

    def directory(self) -> Storage:
        """Return all current files of ``folder``. Raises ReadError."""
        raise NotImplementedError(f"{type(self).__name__} has no directories")

    def measured(self) -> Storage:
        """Return the storage with measured ``cost``. Raises ReadError."""
        return self

    def residency(self) -> Residency:
        """Estimate the distance of the bytes without reading."""
        return Residency(kind=self.schemes[0] if self.schemes else "", resident=None, remote=True)

    def identity(self, file: int) -> Hashable:
        """Return a value that changes with a file's contents.

        None if the file does not exist any more. The default is the known size.
        """
        return self.sizes[file]

    def detach(self, used: Iterable[int] = ()) -> Storage:
        """Return the storage with the identities of the files ``used``, for a later read.

        The result keeps no file open.
        """
        # Get only these identities, since each may cost a request.
        numbers = set(used)
        marks = self.identities or tuple(
            self.identity(n) if n in numbers else None for n in range(len(self.files))
        )
        return replace(self, identities=tuple(m if n in numbers else None for n, m in enumerate(marks)))

    def reattach(self, purpose: str) -> Storage:
        """Return the storage for a later read. Raises ReadError if a file has changed.

        The message ends with ``purpose``.
        """
        for number, before in enumerate(self.identities):
            if before is not None and (now := self.identity(number)) != before:
                raise ReadError(
                    f"{self.files[number]} was changed since the model was loaded "
                    f"(it {self.changed(before, now)}), {purpose}"
                )
        return self

    def changed(self, before: Hashable, now: Hashable) -> str:
        """Describe how a file with identity ``before`` has changed."""
        return "was removed" if now is None else "was replaced or written to"

    @contextlib.contextmanager
    def opened(self, number: int) -> Iterator[tuple[HeaderBytes, int]]:
        """Open a file's header: its bytes and size."""
        with self.reader() as reader:
            yield _Ranges(reader, number, self.sizes[number]), self.sizes[number]


class _Ranges:
    def __init__(self, reader: Reader, file: int, size: int) -> None:
        self._reader, self._file, self._size = reader, file, size

    def read(self, length: int, offset: int) -> bytes:
        buffer = bytearray(max(0, min(length, self._size - offset)))
        if buffer:
            self._reader.read(self._file, offset, [memoryview(buffer)])
        return bytes(buffer)


#: Modules and classes of zerostart's storages by scheme. A registered storage takes precedence.
_OWN = dict.fromkeys(
    ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "http", "https"),
    ("zerostart.checkpoint.storage.object_store", "ObjectFiles"),
)
#: Entry point group of other packages: scheme and subclass of ``Storage``.
GROUP = "zerostart.storages"
_registered: dict[str, type[Storage]] = {}


def register_storage(kind: type[Storage]) -> type[Storage]:
    """Register a storage class for its URL schemes.

    Only in this process; also a decorator. Raises ConfigError for a scheme of another storage, and for a
    class without its own ``at``.
    """
    if not kind.schemes:
        raise ConfigError(f"{kind.__name__} has no URL schemes; set schemes, a tuple of names")
    schemes = [scheme.lower() for scheme in kind.schemes]
    for scheme in schemes:
        # A package may register its class in this process in addition to its entry point.
        installed = _installed().get(scheme)
        is_taken = installed and installed.module.partition(".")[0] != kind.__module__.partition(".")[0]
        if is_taken or _registered.get(scheme, kind) is not kind:
            raise ConfigError(f"a storage for {scheme}:// is already registered; choose another scheme")
    _check_reached(kind)
    _registered.update(dict.fromkeys(schemes, kind))
    return kind


def storage_at(source: object) -> Storage | None:
    """Open the storage at a URL; None for paths.

    Raises ConfigError for an unknown scheme.
    """
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
        # Import the package only when its storage is used.
        kind = _installed()[scheme].load()
        _check_reached(kind)
    elif scheme in _OWN:
        module, name = _OWN[scheme]
        kind = getattr(importlib.import_module(module), name)
    else:
        schemes = sorted({*_registered, *_installed(), *_OWN})
        raise ConfigError(
            f"{shown_url(str(source))}: nothing reads {scheme}:// here; copy the files to a local directory, "
            "register a storage of that scheme (zerostart.checkpoint.storage.register_storage), or use "
            f"{', '.join(schemes)}"
        )
    return kind


def _check_reached(kind: type[Storage]) -> None:
    if getattr(kind.at, "__func__", None) is Storage.at.__func__:  # type: ignore[attr-defined]
        raise ConfigError(f"{kind.__name__} cannot open URLs; give it a class method at(source)")


@functools.cache
def _installed() -> dict[str, Any]:
    return {point.name.lower(): point for point in entry_points(group=GROUP)}
