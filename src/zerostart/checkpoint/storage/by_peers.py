"""A kept model as a source: ``peer:///NAME`` of this machine, ``peer://HOST:PORT,.../NAME`` of others.

The bytes that lie in a machine's shared memory its ranks read there; all others come from the guards of the
machines that have them (``checkpoint/kept/keeper.py``). What several have is taken from another one when one
dies. With ``?instead=SOURCE`` that checkpoint is read where there is no whole version, and in the place of
machines that die during a load, as far as its tensors have the digests of those that were kept.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import threading
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import parse_qs, unquote

from zerostart.checkpoint.catalog import Catalog, TensorEntry
from zerostart.checkpoint.channel import PEERS, Address, Channel, connect, key_of
from zerostart.checkpoint.formats.weights import read_files
from zerostart.checkpoint.kept.folder import (
    WEIGHTS,
    Lease,
    Version,
    checked,
    folder_of,
    is_own,
    memory_name,
    terms_of,
    versions,
)
from zerostart.checkpoint.kept.keeper import MOST_BYTES, MOST_RANGES, PROTOCOL
from zerostart.checkpoint.kept.spans import Spans, first_gap
from zerostart.checkpoint.paths import shown_url
from zerostart.checkpoint.source import open_catalog
from zerostart.checkpoint.storage.base import Reader, Residency, Rows, Storage
from zerostart.checkpoint.strict_json import JsonObject, shown
from zerostart.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    PeerError,
    ReadError,
    ZerostartError,
)

logger = logging.getLogger("zerostart")
#: Seconds within which a peer has to take a connection, and to go on with an answer.
REACHED, ANSWERED = 10.0, 60.0
#: Seconds before a connection that was lost is tried again.
DELAYS = (0.2, 1.0)
#: Requests that the ranks of a machine together have in flight, and machines that are asked at a time.
DEPTH, QUESTIONS = 16, 32
_URL = re.compile(r"peer://(?P<hosts>[^/?]*)/(?P<name>[^/?]+)(?:\?(?P<query>.*))?", re.IGNORECASE | re.DOTALL)

#: A range of a file's bytes, and where they go.
Wanted = tuple[int, memoryview]


@dataclass(frozen=True)
class Holder:
    """A machine that has bytes of a version."""

    #: The folder of the version there.
    path: str
    #: Which shared memory that is in.
    memory: str
    #: Where its guard listens; empty if at none.
    address: str
    spans: bytes = field(repr=False)
    #: Whether what lies beside its weights is what the version has: machines may have other libraries.
    beside: bool = True

    @property
    def name(self) -> str:
        """What to call it in messages."""
        return self.address or self.path

    @property
    def is_here(self) -> bool:
        """Whether this process reads it as files."""
        return self.memory == memory_name() and is_own(Path(self.path))


class Leases:
    """What keeps a version from being removed; stays in the process that has it, and ends with it."""

    def __init__(self) -> None:
        self._held: list[Lease | Channel] = []

    def add(self, one: Lease | Channel) -> None:
        """Hold it, too."""
        self._held.append(one)

    def __reduce__(self) -> tuple[type[Leases], tuple[()]]:
        return Leases, ()

    def __del__(self) -> None:
        for one in self._held:
            one.close()


@dataclass(frozen=True)
class PeerFiles(Storage):
    """The files of one version; all machines' have the same contents."""

    holders: tuple[Holder, ...] = field(default=(), kw_only=True)
    content: str = field(default="", kw_only=True)
    #: All files of the version by name, of which this has some, and their bytes.
    every: tuple[tuple[str, int], ...] = field(default=(), repr=False, kw_only=True)
    #: What the guards of other machines ask for.
    secret: str = field(default="", repr=False, compare=False, kw_only=True)
    #: The source that may stand in for it, and what its tensors have to be: entries, and their digests.
    fallback: str = field(default="", kw_only=True)
    tensors: tuple[tuple[TensorEntry, str], ...] = field(default=(), repr=False, compare=False, kw_only=True)
    leases: Leases = field(default_factory=Leases, repr=False, compare=False, kw_only=True)

    schemes = ("peer",)

    @classmethod
    def at(cls, source: str) -> Storage:
        """The newest version that is whole, of the machines that can be asked."""
        match = _URL.fullmatch(source)
        query = parse_qs(match["query"] or "", strict_parsing=bool(match["query"])) if match else {}
        if match is None or not query.keys() <= {"instead"}:
            raise ConfigError(
                f"{shown_url(source)}: a kept model is peer:///NAME on this machine, or "
                "peer://HOST:PORT/NAME, with several machines divided by commas; ?instead=SOURCE names what "
                "is read without it"
            )
        name, fallback = unquote(match["name"]), query.get("instead", [""])[0]
        addresses = [Address.of(host, PEERS) for host in match["hosts"].split(",") if host]
        try:
            return cls._found(name, addresses, fallback)
        except CheckpointNotFoundError as error:
            if not fallback:
                raise
            logger.warning("%s; reading %s instead", error, fallback)
            return cls((), (), instead=fallback)

    @classmethod
    def _found(cls, name: str, addresses: Sequence[Address], fallback: str) -> PeerFiles:
        folder, secret = folder_of(name), os.environ.get(PEERS.variable, "")
        own_secret = str(terms_of(folder).get("secret", "")) if is_own(folder) else ""
        asked = _Asked(name, secret or own_secret)
        if not addresses:
            if not is_own(folder) or not (own := versions(folder)):
                raise CheckpointNotFoundError(
                    f"peer:///{name}: no whole version of a model is kept under this name in the memory of "
                    "this machine"
                )
            asked.add_own(own)
        asked.ask(addresses)
        where = ",".join(map(str, addresses)).replace("tcp://", "")
        holders, document, leases = asked.newest(f"peer://{where}/{name}")
        files = dict(document["files"])
        kind = cls if all(holder.is_here for holder in holders) else FarPeerFiles
        made = kind(
            tuple(f"peer://{where}/{name}/{file}" for file in files),
            tuple(files.values()),
            tuple(document["content"] for _ in files),
            folder=f"peer://{where}/{name}",
            asked=WEIGHTS,
            holders=holders,
            content=document["content"],
            every=tuple(files.items()),
            secret=asked.secret,
            fallback=fallback,
            leases=leases,
        )
        if fallback:
            weights = made.named([WEIGHTS])
            try:
                ((entries, _, _),) = read_files(weights.files, (0,), weights)
            except ReadError as error:  # it died between two questions
                raise CheckpointNotFoundError(str(error)) from error
            digests = document["digests"]
            known = [(entry, str(digests.get(entry.name, ""))) for entry in entries if entry.nbytes]
            made = replace(made, tensors=tuple(sorted(known, key=lambda pair: pair[0].offset)))
        return made

    def named(self, names: Sequence[str]) -> Storage:
        """See ``Storage``: of the same version."""
        sizes = dict(self.every)
        for name in names:
            if name not in sizes:
                raise CheckpointNotFoundError(f"{self.folder}/{name}: this file was not kept")
        return replace(
            self,
            files=tuple(f"{self.folder}/{name}" for name in names),
            sizes=tuple(sizes[name] for name in names),
            identities=tuple(self.content for _ in names),
        )

    def directory(self) -> Storage:
        """See ``Storage``: a version does not change."""
        return self.named([name for name, _ in self.every])

    def reader(self, *, cold: bool = False, direct: bool = False) -> Reader:
        """See ``Storage``; what is in this machine's memory is read from there."""
        return PeerReader(self)

    def residency(self) -> Residency:
        """In memory, here or elsewhere."""
        here = [Spans.from_bytes(holder.spans) for holder in self.holders if holder.is_here]
        if here and first_gap(here, self._weights) is None:
            return Residency("memory", 1.0)
        return Residency("peer", None, remote=True, depth=DEPTH, buffer=MOST_BYTES)

    def identity(self, file: int) -> Hashable:
        """The contents of the version, as long as somebody has it."""
        there = []
        for holder in self.holders:
            with contextlib.suppress(ZerostartError, OSError):
                _leased(holder, self.secret).close()
                there.append(Spans.from_bytes(holder.spans))
        return self.content if there and first_gap(there, self._weights) is None else None

    @property
    def _weights(self) -> int:
        """Bytes of the file of weights."""
        return dict(self.every).get(WEIGHTS, 0)

    def kept(self, used: Iterable[int] = ()) -> Storage:
        """See ``Storage``: nothing holds the version."""
        wanted = set(used)
        marks = tuple(self.content if number in wanted else None for number in range(len(self.files)))
        return replace(self, identities=marks, leases=Leases())


class FarPeerFiles(PeerFiles):
    """Of which other machines have a part: what one rank was sent is nowhere for the others."""

    cached = False


class _Asked:
    """What machines have said of the versions that they have of the model ``name``."""

    def __init__(self, name: str, secret: str) -> None:
        self._name, self.secret = name, secret
        #: By content: the holders of a version, and its document.
        self._found: dict[str, tuple[list[Holder], JsonObject]] = {}
        self._silent: dict[str, str] = {}

    def add_own(self, found: Iterable[Version]) -> None:
        """Versions in this machine's memory."""
        for version in found:
            with contextlib.suppress(CheckpointError, OSError):
                holder = Holder(str(version.path), memory_name(), "", version.spans.to_bytes())
                self._add(holder, version.document)

    def ask(self, addresses: Iterable[Address]) -> None:
        """Those that listen there, and those whose addresses the versions have."""
        known: set[Address] = set()
        waiting = [*addresses, *self._others()]
        with ThreadPoolExecutor(QUESTIONS) as pool:
            while waiting := [address for address in dict.fromkeys(waiting) if address not in known]:
                known.update(waiting)
                for address, answer in zip(waiting, pool.map(self._answer, waiting), strict=True):
                    if isinstance(answer, str):
                        self._silent[str(address)] = answer
                        continue
                    for holder, document in answer:
                        self._add(holder, document)
                waiting = self._others()

    def _answer(self, address: Address) -> list[tuple[Holder, JsonObject]] | str:
        """What listens there has; in words, why nothing is known of it."""
        try:
            with contextlib.closing(_greeted(address, self.secret)) as channel:
                channel.send("versions")
                answer = channel.receive("versions")
            documents = answer.body.get("documents")
            if not isinstance(documents, list) or len(documents) != len(answer.parts):
                raise CheckpointError(f"{address}: no documents with spans")
            found = []
            for document, spans in zip(documents, answer.parts, strict=True):
                if isinstance(document, dict):
                    if (other := document.get("name")) != self._name:
                        raise CheckpointError(f"{address} keeps {shown(str(other))}, not {self._name!r}")
                    Spans.from_bytes(spans)
                    path, memory = str(document.get("path")), str(document.get("memory"))
                    found.append((Holder(path, memory, str(address), spans), checked(document)))
            return found
        except (ZerostartError, OSError) as error:
            return str(error)

    def _add(self, holder: Holder, document: JsonObject) -> None:
        holders, first = self._found.setdefault(document["content"], ([], document))
        if first["files"] != document["files"]:
            holder = replace(holder, beside=False)
        for number, other in enumerate(holders):
            same = (other.path, other.memory) == (holder.path, holder.memory)
            if same and other.address in ("", holder.address):
                # In this memory, and also served from it: who cannot look into it asks.
                holders[number] = replace(other, address=holder.address)
                return
        holders.append(holder)

    def _others(self) -> list[Address]:
        nodes = (node for _, document in self._found.values() for node in document["nodes"])
        return [Address.of(node, PEERS) for node in nodes if node]

    def newest(self, what: str) -> tuple[tuple[Holder, ...], JsonObject, Leases]:
        """The newest version that is whole, and what keeps it so.

        Raises CheckpointNotFoundError, and says what is missing.
        """
        missing = ""
        for holders, document in sorted(self._found.values(), key=lambda each: -int(each[1]["number"])):
            there, leases = [], Leases()
            for holder in holders:
                try:
                    leases.add(_leased(holder, self.secret))
                    there.append(holder)
                except (ZerostartError, OSError) as error:  # since it has answered
                    self._silent[holder.name] = str(error)
            spans = [Spans.from_bytes(holder.spans) for holder in there]
            if (gap := first_gap(spans, document["files"][WEIGHTS])) is None:
                return tuple(there), document, leases
            missing = missing or f" (of version {document['number']} byte {gap} is missing)"
        silent = "".join(f"; {why}" for why in self._silent.values())
        raise CheckpointNotFoundError(f"{what}: no whole version of a kept model is there{missing}{silent}")


def _leased(holder: Holder, secret: str) -> Lease | Channel:
    """What keeps a holder's version from being removed. Raises ReadError, PeerError, OSError."""
    if holder.is_here:
        with contextlib.suppress(FileNotFoundError):
            return Lease(Path(holder.path))
    return _opened(holder, secret)


def _greeted(address: Address, secret: str) -> Channel:
    channel = connect(address, key_of(secret, address, PEERS), REACHED, wait=False)
    try:
        channel.send("hello", {"protocol": PROTOCOL})
        answer = channel.receive("welcome", "refused", timeout=REACHED)
        if answer.kind == "refused":
            raise ReadError(f"{address}: {answer.body.get('why')}")
    except BaseException:
        channel.close()
        raise
    return channel


def _opened(holder: Holder, secret: str) -> Channel:
    """A connection on which the version is open. Raises ReadError and PeerError."""
    if not holder.address:
        raise ReadError(f"{holder.path} is in the memory of another machine, or gone, and nobody serves it")
    channel = _greeted(Address.of(holder.address, PEERS), secret)
    try:
        channel.send("open", {"path": holder.path})
        if channel.receive("opened", "gone", timeout=REACHED).kind == "gone":
            raise ReadError(f"{holder.address} does not have this version any more")
    except BaseException:
        channel.close()
        raise
    return channel


# Reading.


class PeerReader(Reader):
    """Ranges of a version's files, from who has them; safe to share between threads."""

    def __init__(self, storage: PeerFiles) -> None:
        self._storage = storage
        self._names = storage.names()
        self._sources: list[_Source] = []
        others: list[_Source] = []
        for holder in storage.holders:
            if holder.is_here:
                with contextlib.suppress(OSError):
                    self._sources.append(_Here(holder, self._names))
                    continue
            others.append(_There(holder, storage.secret))
        # So that not all ranks ask the same one of several that have the same.
        random.Random(os.getpid()).shuffle(others)
        self._sources += others
        self._instead = _Instead(storage) if storage.fallback and storage.tensors else None
        self._lock = threading.Lock()
        self._lost: dict[str, str] = {}

    def __exit__(self, *_: object) -> None:
        for source in self._sources:
            source.close()

    def note(self) -> str:
        """Who died meanwhile."""
        return f"without {', '.join(self._lost)}" if self._lost else ""

    def read(self, file: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """See ``Reader``."""
        wanted: list[Wanted] = []
        for buffer in buffers:
            wanted.append((offset, buffer))
            offset += len(buffer)
        self._fill(file, wanted)

    def gather(self, file: int, offset: int, rows: Rows, target: memoryview, step: int) -> None:
        """See ``Reader``: many rows are one request."""
        each = (
            (offset + n * rows.stride, target[n * step : n * step + rows.width]) for n in range(rows.count)
        )
        self._fill(file, [*each])

    def _fill(self, file: int, wanted: list[Wanted]) -> None:
        name = self._names[file]
        for source in self._sources:
            if not wanted or source.holder.name in self._lost:
                continue
            has, rest = source.divided(name, wanted)
            if not has:
                continue
            try:
                source.fill(name, has)
                wanted = rest
            except (ZerostartError, OSError) as error:
                with self._lock:
                    told = self._lost.setdefault(source.holder.name, str(error))
                if told == str(error):
                    logger.warning("%s: %s; others are asked", self._storage.files[file], error)
        if wanted and self._instead is not None and name == WEIGHTS:
            self._instead.fill(wanted)
            wanted = []
        if wanted:
            first, view = wanted[0]
            fallback = self._storage.fallback
            raise ReadError(
                f"{self._storage.files[file]}: nobody who is there has bytes {first} to {first + len(view)} "
                f"of this version ({'; '.join(self._lost.values()) or 'it was replaced'}); load again"
                + (
                    f": {fallback} stands in for tensors alone"
                    if fallback
                    else ", or name what is to be read instead (?instead=SOURCE)"
                )
            )


class _Source(ABC):
    """One machine's share of a version."""

    def __init__(self, holder: Holder) -> None:
        self.holder = holder
        self._spans = Spans.from_bytes(holder.spans)

    def divided(self, name: str, wanted: Iterable[Wanted]) -> tuple[list[Wanted], list[Wanted]]:
        """What this machine has of ``wanted``, and the rest."""
        if name != WEIGHTS:
            return ([*wanted], []) if self.holder.beside else ([], [*wanted])
        has: list[Wanted] = []
        rest: list[Wanted] = []
        for first, view in wanted:
            for begin, end, there in self._spans.pieces(first, first + len(view)):
                (has if there else rest).append((begin, view[begin - first : end - first]))
        return has, rest

    @abstractmethod
    def fill(self, name: str, wanted: Sequence[Wanted]) -> None:
        """Fill all of ``wanted``, which it has. Raises OSError, ZerostartError."""

    @abstractmethod
    def close(self) -> None:
        """Close what is open."""


class _Here(_Source):
    """In this machine's memory."""

    def __init__(self, holder: Holder, names: Iterable[str]) -> None:
        """Opens the files: they are read to the end even if the kept model is dropped. Raises OSError."""
        super().__init__(holder)
        self._lease = Lease(Path(holder.path))
        self._files: dict[str, int] = {}
        try:
            for name in names if holder.beside else (WEIGHTS,):
                flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
                self._files[name] = os.open(Path(holder.path, name), flags)
        except BaseException:
            self.close()
            raise

    def fill(self, name: str, wanted: Sequence[Wanted]) -> None:
        handle = self._files[name]
        for first, view in wanted:
            done = 0
            while done < len(view):
                count = os.preadv(handle, [view[done:]], first + done)
                if not count:
                    raise ReadError(f"{self.holder.path}/{name} ended at byte {first + done}")
                done += count

    def close(self) -> None:
        for handle in self._files.values():
            os.close(handle)
        self._files.clear()
        self._lease.close()


class _There(_Source):
    """In another's, by its guard: a connection for each thread that reads."""

    def __init__(self, holder: Holder, secret: str) -> None:
        super().__init__(holder)
        self._secret = secret
        self._idle: list[Channel] = []
        self._lock = threading.Lock()

    def fill(self, name: str, wanted: Sequence[Wanted]) -> None:
        for batch in _batches(wanted):
            self._ask(name, batch)

    def _ask(self, name: str, batch: Sequence[Wanted]) -> None:
        with self._lock:
            channel = self._idle.pop() if self._idle else None
        if channel is not None:
            try:
                self._read(channel, name, batch)
                return
            except PeerError:
                channel.close()  # a connection may break where the machine lives: once more by another one
        # A guard that has too many readers ends connections; one that is dead is told within two seconds.
        for delay in (*DELAYS, None):
            try:
                with _closed_on_error(_opened(self.holder, self._secret)) as channel:
                    self._read(channel, name, batch)
                return
            except PeerError:
                if delay is None:
                    raise
                time.sleep(delay)

    def _read(self, channel: Channel, name: str, batch: Sequence[Wanted]) -> None:
        channel.send("read", {"file": name, "ranges": [[first, len(view)] for first, view in batch]})
        (data,) = channel.receive("bytes", timeout=ANSWERED).parts or (b"",)
        if len(data) != sum(len(view) for _, view in batch):
            channel.close()
            raise PeerError(f"{channel.who} gave {len(data)} bytes, which were not asked for")
        at, whole = 0, memoryview(data)
        for _, view in batch:
            view[:] = whole[at : at + len(view)]
            at += len(view)
        with self._lock:
            self._idle.append(channel)

    def close(self) -> None:
        for channel in self._idle:
            channel.close()


@contextlib.contextmanager
def _closed_on_error(channel: Channel) -> Iterator[Channel]:
    try:
        yield channel
    except BaseException:
        channel.close()
        raise


def _batches(wanted: Iterable[Wanted]) -> Iterator[list[Wanted]]:
    """The same bytes in requests that a guard answers."""
    batch: list[Wanted] = []
    room = MOST_BYTES
    for first, view in wanted:
        while len(view):
            part = view[:room]
            batch.append((first, part))
            first, view, room = first + len(part), view[len(part) :], room - len(part)
            if not room or len(batch) == MOST_RANGES:
                yield batch
                batch, room = [], MOST_BYTES
    if batch:
        yield batch


class _Instead:
    """A checkpoint whose tensors stand in for those of a version, if they are the same to the bit."""

    def __init__(self, storage: PeerFiles) -> None:
        self._storage = storage
        self._starts = [entry.offset for entry, _ in storage.tensors]
        self._lock = threading.Lock()
        self._catalog: Catalog | None = None
        self._same: set[str] = set()

    def fill(self, wanted: Iterable[Wanted]) -> None:
        """Raises ReadError where a tensor is another one there, and what opening and reading raise."""
        for first, view in wanted:
            at = max(0, bisect_right(self._starts, first) - 1)
            while len(view):
                if at == len(self._starts):
                    raise ReadError(f"{self._storage.fallback} has nothing of bytes from {first} on")
                entry, digest = self._storage.tensors[at]
                if first < entry.offset:  # of the header, which another file has otherwise
                    raise ReadError(f"{self._storage.fallback} stands in for tensors alone; load again")
                part = view[: entry.offset + entry.nbytes - first]
                self._read(entry, digest, first - entry.offset, part)
                first, view, at = first + len(part), view[len(part) :], at + 1

    def _read(self, entry: TensorEntry, digest: str, offset: int, part: memoryview) -> None:
        from zerostart.checkpoint.digest import is_comparable  # torch, which a catalog alone does without

        with self._lock:
            if self._catalog is None:
                self._catalog = open_catalog(self._storage.fallback)
            catalog = self._catalog
            there = None if catalog.assembled is not None else catalog.tensors.get(entry.name)
            if there is None or (there.dtype, there.shape) != (entry.dtype, entry.shape):
                raise ReadError(f"{self._storage.fallback} has no tensor {entry.name} as it was kept")
            with catalog.storage.reader() as reader:
                if entry.name not in self._same:
                    if not is_comparable(digest):
                        raise ReadError(
                            f"{self._storage.fallback}: tensor {entry.name} cannot be compared with what was "
                            "kept, whose digests are of another version of zerostart; keep the model with "
                            "this one"
                        )
                    if _digest(reader, there) != digest:
                        raise ReadError(
                            f"{self._storage.fallback}: tensor {entry.name} has other values than were "
                            "kept; a peer is gone, and nobody has its part of this version"
                        )
                    self._same.add(entry.name)
                reader.read(there.file, there.offset + offset, [part])


def _digest(reader: Reader, entry: TensorEntry) -> str:
    from zerostart.checkpoint.digest import Digests  # torch, which a catalog alone does without

    digests = Digests([(entry.name, entry.dtype, entry.shape)])
    width = max(1, entry.nbytes // max(1, _elements(entry)))
    buffer = bytearray(min(MOST_BYTES, entry.nbytes))
    for at in range(0, entry.nbytes, MOST_BYTES):
        part = memoryview(buffer)[: min(MOST_BYTES, entry.nbytes - at)]
        reader.read(entry.file, entry.offset + at, [part])
        digests.add(entry.name, at // width, part)
    return digests.summed()[entry.name]


def _elements(entry: TensorEntry) -> int:
    count = 1
    for size in entry.shape:
        count *= size
    return count
