"""Files of an object store or a web server, by requests for ranges of them.

What a library of stores has to give is a ``Bucket``; a directory, ranges that are tried again, and what
a request costs are here, the same for all of them.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self, TypeVar

from zerostart.checkpoint.storage.base import Reader, RequestCost, Residency, Rows, Storage
from zerostart.checkpoint.usual_names import STANDARD_NAMES, USUAL_SETTINGS
from zerostart.errors import CheckpointNotFoundError, ConfigError, ReadError

#: Seconds before each further attempt, the last of them before all that follow: of a request for bytes, which
#: is tried again until patience ends, and of the first questions, whose attempts are counted: a wrong address
#: should be told soon. At random up to half of it less, so that ranks which were refused together do not come
#: back together.
DELAYS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
DELAYS_OF_QUESTIONS = DELAYS[:4]
#: What says for how many seconds nothing may come from a store, and how many where it says nothing. A request
#: is given up after half of them without a byte, and asked again.
PATIENCE, USUAL_PATIENCE = "ZEROSTART_STORE_PATIENCE", 30.0
#: Times the patience for which one range may stay away while others come.
MOST_PATIENCE = 4
#: Bytes that a reader has of an answer at a time, and those that it takes with what lies in its sockets.
PIECE, BUFFER = 256 << 10, 1 << 20
#: Requests that the ranks of a machine together have in flight.
DEPTH = 64
#: Questions that are asked at once.
QUESTIONS = 16
#: Most bytes of an object that come with the answer to the first question, least, and most of all objects
#: together: most headers of shards are within them.
HEAD, LEAST_HEAD, HEADS = 256 << 10, 16 << 10, 16 << 20
#: What a request takes where it is not worth measuring: seconds, and bytes a second of one stream.
USUAL = RequestCost(latency=0.03, rate=100e6)
#: Files that are shorter together are not worth it; bytes of the request that measures the rate, and how
#: often it is made at most until one goes through at once.
MEASURED, SAMPLE, SAMPLES = 64 << 20, 4 << 20, 3
#: What names a file, and no directory.
FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".json")

T = TypeVar("T")


class PassingError(Exception):
    """A fault that a later attempt may not meet."""


class RefusedError(Exception):
    """A fault that will be there again."""


class ChangedError(Exception):
    """The object is not the one that was opened."""


@dataclass(frozen=True, slots=True)
class Found:
    """An object that is there: its length, and what tells it from what it is replaced by."""

    size: int
    mark: Hashable


class Bucket(ABC):
    """What a library of stores gives of one of them. Keys have no slash at their ends.

    Methods raise PassingError and RefusedError, both with words.
    """

    @abstractmethod
    def list(self, folder: str) -> dict[str, int] | None:
        """Keys and lengths of the objects right below ``folder``; None where the store tells nobody."""

    def folders(self, folder: str) -> Iterable[str]:
        """Keys of the folders right below ``folder``, without slashes at their ends; () where none tells."""
        return ()

    @abstractmethod
    def find(self, key: str) -> Found | None:
        """The object at ``key``, None if there is none."""

    def begin(self, key: str, length: int) -> tuple[Found, bytes] | None:
        """The same, and up to ``length`` of its first bytes, where one request asks for both."""
        found = self.find(key)
        return None if found is None else (found, b"")

    @abstractmethod
    def stream(self, key: str, begin: int, end: int, known: Found | None) -> Iterator[bytes]:
        """Bytes ``begin`` to ``end`` in pieces of about ``PIECE``, without gaps; perhaps not up to the end.

        Raises ChangedError for another object than ``known``, FileNotFoundError where there is none.
        """


@dataclass(frozen=True)
class ObjectFiles(Storage, ABC):
    """``files`` are URLs; ``identities`` the marks that the objects had when they were opened."""

    #: What is before the keys in the names of files.
    root: str = field(default="", kw_only=True)
    #: The URL by which the library reaches the store; it may have secrets, which ``root`` has not.
    base: str = field(default="", repr=False, compare=False, kw_only=True)
    #: First bytes of the files, as far as they are known: for opening alone.
    heads: tuple[bytes, ...] = field(default=(), repr=False, compare=False, kw_only=True)

    cached = False
    #: Bytes of a reader's thread beside what it fills.
    buffer: ClassVar[int] = BUFFER

    def __getstate__(self) -> dict[str, object]:
        """Without the first bytes, which are for who opens."""
        return {**self.__dict__, "heads": ()}

    @classmethod
    @abstractmethod
    def places(cls, source: str) -> tuple[str, str, str]:
        """``root``, ``base`` and the key that a URL means. Raises ConfigError for what is none."""

    @abstractmethod
    def bucket(self) -> Bucket:
        """The store, as this process reaches it. Raises ConfigError."""

    @classmethod
    def at(cls, source: str) -> Storage:
        """See ``Storage``: a file, with what lies beside it, or the files of a directory."""
        root, base, key = cls.places(source)
        here = cls((), (), root=root, base=base)
        folder, _, name = key.rpartition("/")
        if key.endswith(FILES) and (found := here._find(key)):
            return here._below(folder, {key: found}, name)
        below = here._below(key)
        # A file may be called anything: it is asked for where there is no directory of the name.
        if not below.files and not key.endswith(FILES) and key and (found := here._find(key)):
            return here._below(folder, {key: found}, name)
        # What accelerate saves of DeepSpeed lies in a folder within.
        if not below.files and not below.folders():
            raise CheckpointNotFoundError(
                f"{root}{key}: there is no such file, and no directory of that name with files of a "
                "checkpoint; look for a mistake in the URL, or for credentials: of what one may not see some "
                "stores say this, too"
            )
        return below

    def names(self) -> tuple[str, ...]:
        """See ``Storage``."""
        return tuple(file[len(self.folder) + 1 :] for file in self.files)

    def named(self, names: Sequence[str]) -> Storage:
        """See ``Storage``; each is asked for, so that a file's mark comes from where its bytes do."""
        keys = [self._key(f"{self.folder}/{name}") for name in names]
        length = min(HEAD, HEADS // max(1, len(keys)))
        length = length if length >= LEAST_HEAD else 0
        begun = self._each(keys, lambda bucket, key: bucket.begin(key, length))
        for name, key in zip(names, keys, strict=True):
            if key not in begun:
                raise CheckpointNotFoundError(
                    f"{self.folder}/{name}: this file of the checkpoint is missing; upload it again"
                )
        opened = self._of({key: begun[key][0] for key in keys})
        return replace(opened, heads=tuple(begun[key][1] for key in dict.fromkeys(keys)))

    def directory(self) -> Storage:
        """See ``Storage``."""
        return self._below(self._key(f"{self.folder}/").rstrip("/"))

    def within(self, name: str) -> Storage | None:
        """See ``Storage``: by one request."""
        folder = f"{self.folder}/{name}"
        try:
            listed = self._listed(self._key(folder))
        except ReadError as error:
            if not isinstance(error.__cause__, RefusedError):
                raise
            listed = None
        if not listed:
            return None
        return replace(self._of({key: Found(size, None) for key, size in listed.items()}), folder=folder)

    def folders(self, name: str = "") -> Sequence[str]:
        """See ``Storage``: by one request."""
        place = self._key(f"{self.folder}/{name}").strip("/")
        found = self._asked(lambda: self.bucket().folders(place), place)
        names = [key.rpartition("/")[2] for key in found if key.rpartition("/")[0] == place]
        return [name for name in names if name not in ("", ".", "..")]

    def measured(self) -> Storage:
        """See ``Storage``. A checkpoint that is soon read is read as is usual."""
        opened = replace(self, heads=())
        if self.nbytes < MEASURED:
            return replace(opened, cost=USUAL)
        file = max(range(len(self.files)), key=lambda number: self.sizes[number])
        length = min(SAMPLE, self.sizes[file])
        samples = (opened._sample(file, length) for _ in range(SAMPLES))
        moments = next((sample for sample in samples if sample), None)
        if moments is None:
            return replace(opened, cost=USUAL)
        # The first piece is of the first bytes that come; a fast store has sent more of them by then.
        latency, seconds = moments[1] - moments[0], moments[-1] - moments[0]
        rate = length / max(seconds - latency, seconds / 8)
        cost = RequestCost(float(f"{latency:.2g}"), float(f"{rate:.2g}"), measured=True)
        return replace(opened, cost=cost)

    def _sample(self, file: int, length: int) -> list[float]:
        """When a range was asked for and its pieces came; nothing where it was asked for again in between."""
        moments = [time.perf_counter()]
        with ObjectReader(self) as reader:
            reader.fetch(file, 0, length, lambda at, piece: moments.append(time.perf_counter()))
        return [] if reader.retries else moments

    def reader(self, *, cold: bool = False, direct: bool = False) -> Reader:
        """A reader by ranges; there is no cache to know of."""
        return ObjectReader(self)

    def residency(self) -> Residency:
        """Far away; how many requests suit it."""
        return Residency(self.root.partition(":")[0], None, True, depth=DEPTH, buffer=self.buffer)

    def identity(self, file: int) -> Hashable:
        """The mark that the object has now."""
        found = self._find(self._key(self.files[file]))
        return None if found is None else found.mark

    def kept(self, used: Iterable[int] = ()) -> Storage:
        """See ``Storage``: the files ``used`` have to be those that were opened."""
        wanted = set(used)
        marks = tuple(mark if n in wanted else None for n, mark in enumerate(self.identities))
        return replace(self, identities=marks)

    def changed(self, before: Hashable, now: Hashable) -> str:
        """In words, what became of an object."""
        return "was removed" if now is None else f"was replaced: its ETag is {now} and was {before}"

    def found(self, file: int) -> Found | None:
        """What file number ``file`` has to be."""
        mark = self.identities[file] if self.identities else None
        return None if mark is None else Found(self.sizes[file], mark)

    def _key(self, file: str) -> str:
        return file.removeprefix(self.root)

    def _find(self, key: str) -> Found | None:
        return self._asked(lambda: self.bucket().find(key), key)

    def _asked(self, question: Callable[[], T], key: str) -> T:
        delays = DELAYS_OF_QUESTIONS
        return patiently(question, f"{self.root}{key}: asking the store failed", delays, len(delays))

    def _listed(self, folder: str) -> dict[str, int] | None:
        """What the bucket lists right below ``folder``, and nothing else: copies have these names."""
        listed = self._asked(lambda: self.bucket().list(folder), folder)

        def belongs(key: str) -> bool:
            place, _, name = key.rpartition("/")
            return place == folder and name not in ("", ".", "..")

        return None if listed is None else {key: size for key, size in listed.items() if belongs(key)}

    def _found(self, keys: Iterable[str], refused: list[ReadError] | None = None) -> dict[str, Found]:
        """Those of ``keys`` that are there. One that is refused is not, if the list takes the refusal."""
        return self._each(keys, lambda bucket, key: bucket.find(key), refused)

    def _each(
        self,
        keys: Iterable[str],
        question: Callable[[Bucket, str], T | None],
        refused: list[ReadError] | None = None,
    ) -> dict[str, T]:
        """The answers that the bucket gives for ``keys``, of which there may be none."""

        def ask(key: str) -> T | None:
            try:
                return self._asked(lambda: question(self.bucket(), key), key)
            except ReadError as error:
                if refused is None or not isinstance(error.__cause__, RefusedError):
                    raise
                refused.append(error)
                return None

        wanted = list(dict.fromkeys(keys))
        with ThreadPoolExecutor(max(1, min(QUESTIONS, len(wanted)))) as pool:
            answers = dict(zip(wanted, pool.map(ask, wanted), strict=True))
        return {key: one for key, one in answers.items() if one is not None}

    def _of(self, found: dict[str, Found]) -> Self:
        return replace(
            self,
            files=tuple(f"{self.root}{key}" for key in found),
            sizes=tuple(one.size for one in found.values()),
            identities=tuple(one.mark for one in found.values()),
            heads=(),
        )

    def _below(self, folder: str, known: dict[str, Found] | None = None, asked: str = "") -> Storage:
        """The files of a directory that may be of use: listed, or those of the usual names.

        Who may read some objects need not be allowed to list them, nor to ask for others: with a signed URL,
        or a policy for reading alone.
        """
        begin = f"{folder}/" if folder else ""
        refused: list[ReadError] = []
        try:
            listed = self._listed(folder)
        except ReadError as error:
            if not isinstance(error.__cause__, RefusedError):
                raise
            refused.append(error)
            listed = None
        found = known or {}
        if listed is not None:
            # Without marks: those that are read are asked for by ``named``.
            found = found | {key: Found(size, None) for key, size in listed.items() if key not in found}
        else:
            names = (f"{begin}{name}" for name in (*STANDARD_NAMES, *USUAL_SETTINGS))
            found = found | self._found((key for key in names if key not in found), refused)
            if refused and not found:
                raise refused[0]
        return replace(self._of(found), folder=f"{self.root}{folder}".removesuffix("/"), asked=asked)


class ObjectReader(Reader):
    """Ranges of objects, each tried again where it breaks off; safe to share between threads."""

    def __init__(self, storage: ObjectFiles) -> None:
        self._storage = storage
        self._bucket = storage._asked(storage.bucket, "")
        self._lock = threading.Lock()
        self._last = 0.0  # when a piece came last
        self.retries = 0  #: attempts that met a passing fault of the store

    def read(self, file: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """See ``Reader``."""
        left = list(buffers)

        def fill(_: int, piece: memoryview) -> None:
            while piece and left:
                count = min(len(piece), len(left[0]))
                left[0][:count] = piece[:count]
                left[0], piece = left[0][count:], piece[count:]
                if not left[0]:
                    left.pop(0)

        self.fetch(file, offset, sum(map(len, buffers)), fill)

    def gather(self, file: int, offset: int, rows: Rows, target: memoryview, step: int) -> None:
        """See ``Reader``: one request for all, where what lies between them costs less than a request."""
        if rows.stride - rows.width > self._storage.gap:
            super().gather(file, offset, rows, target, step)
            return

        def scatter(at: int, piece: memoryview) -> None:
            end = at + len(piece)
            for row in range(at // rows.stride, min(rows.count, -(-end // rows.stride))):
                begin = row * rows.stride
                first, last = max(at, begin), min(end, begin + rows.width)
                if first < last:
                    place = row * step + first - begin
                    target[place : place + last - first] = piece[first - at : last - at]

        self.fetch(file, offset, rows.span, scatter)

    def note(self) -> str:
        """How many requests were tried again."""
        return f"{self.retries} requests tried again" if self.retries else ""

    def fetch(self, file: int, offset: int, length: int, put: Callable[[int, memoryview], None]) -> None:
        """Give ``put`` all bytes of a range in their order, each piece with its distance from the start."""
        storage, name = self._storage, self._storage.files[file]
        if offset + length > storage.sizes[file]:
            raise ReadError(
                f"{name} ended at byte {storage.sizes[file]}, where bytes {offset} to {offset + length} "
                "were expected; was it replaced during the load?"
            )
        key, known = storage._key(name), storage.found(file)
        head = storage.heads[file][offset : offset + length] if storage.heads else b""
        if head:
            put(0, memoryview(head))
        done = len(head)

        def attempt() -> None:
            nonlocal done
            before = done
            try:
                for piece in self._bucket.stream(key, offset + done, offset + length, known):
                    put(done, memoryview(piece)[: length - done])
                    done = min(length, done + len(piece))
                    self._last = time.monotonic()
                if done < length:
                    raise PassingError(f"the answer broke off {length - done} bytes before its end")
            except PassingError:
                if done == before:
                    raise
                self._missed()  # what is left is another request, with all of the patience

        try:
            while done < length:
                patiently(
                    attempt,
                    f"reading {length} bytes of {name} at offset {offset} failed",
                    missed=self._missed,
                    progressed=lambda: self._last,
                )
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(f"{name} was removed after the checkpoint was opened") from error
        except ChangedError as error:
            raise ReadError(
                f"{name} was changed since the checkpoint was opened ({error}); load again when no other "
                "process writes to it"
            ) from error

    def _missed(self) -> None:
        with self._lock:
            self.retries += 1


def patience() -> float:
    """Seconds for which nothing may come from a store. Raises ConfigError for what is no number of them."""
    given = os.environ.get(PATIENCE, "")
    try:
        seconds = float(given or USUAL_PATIENCE)
    except ValueError:
        seconds = math.nan
    if not 1 <= seconds < math.inf:
        raise ConfigError(f"{PATIENCE}={given}: a number of seconds from 1 on is wanted")
    return seconds


def patiently(
    call: Callable[[], T],
    what: str,
    delays: Sequence[float] = DELAYS,
    most: float = math.inf,
    missed: Callable[[], None] = lambda: None,
    progressed: Callable[[], float] = lambda: 0.0,
) -> T:
    """What ``call`` gives, tried again after ``delays``, ``most`` times, while it meets a PassingError.

    Raises ReadError that begins with ``what``: for a RefusedError at once, and after two attempts where
    nothing has come for the patience, neither here nor, by the clock, from what has ``progressed`` beside it.
    """
    limit, begun = patience(), time.monotonic()
    for number in itertools.count(1):
        try:
            return call()
        except RefusedError as error:
            raise ReadError(f"{what}: {error}") from error
        except PassingError as error:
            now = time.monotonic()
            left = min(begun + MOST_PATIENCE * limit, max(begun, progressed()) + limit) - now
            if number > most or (number > 1 and left <= 0):
                raise ReadError(
                    f"{what}, {number} times in {now - begun:.0f} s: {error}; try again when the store "
                    f"answers, or wait for it longer: {PATIENCE}={2 * limit:.0f} (seconds)"
                ) from error
        missed()
        delay = delays[min(number, len(delays)) - 1] * random.uniform(0.5, 1)
        time.sleep(max(0.0, min(delay, left)))
    raise AssertionError("the last attempt returns or raises")
