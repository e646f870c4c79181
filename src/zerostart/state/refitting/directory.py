"""A directory by which versions travel to workers that come and go: what is in it, and how it is read.

Each rank writes one file of a version, of messages one after the other (``messages.py``); a list says where
these are, with a checksum of each; last of all the document names the version, and that is the switch. A
version has all bytes, or what has changed since the one before; the document names those that lead to the
newest one, and those that led to the one before these.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import torch

from zerostart.checkpoint.digest import Digests
from zerostart.checkpoint.strict_json import MAX_DOCUMENT_BYTES, JsonObject, load_json, read_json
from zerostart.checkpoint.write.folders import sync_directory, write_whole
from zerostart.errors import CheckpointError, ConfigError, ReadError, WriteError
from zerostart.state.refitting.image import Image
from zerostart.state.refitting.messages import Message

logger = logging.getLogger("zerostart")
#: Changes with what is in the files.
FORMAT = 2
DOCUMENT = "refit.json"
#: Where workers say what they serve.
FOLLOWERS = "followers"
#: Seconds after which a worker that waits sees to what it has said, and after which one counts as gone.
LOOKS, AWAY = 10.0, 120.0
#: Of all files that belong to a version.
_OURS = re.compile(r"(?P<stem>\d{8}-[0-9a-f]{8})(-\d{5}\.messages|\.list|\.image|\.part)")
_STEM = re.compile(r"\d{8}-[0-9a-f]{8}")


def directory_of(address: object) -> Path | None:
    """The directory that ``file:///path`` names; None for any other address."""
    if not isinstance(address, str) or not address.startswith("file:"):
        return None
    path = Path(unquote(address.removeprefix("file:").removeprefix("//")))
    if not path.is_absolute():
        raise ConfigError(f"{address!r} is no directory: give file:///path")
    return path


def new_stem(version: int) -> str:
    """What the names of a version's files begin with."""
    return f"{version:08d}-{uuid.uuid4().hex[:8]}"


@dataclass(frozen=True)
class Place:
    """Where a message is in a file, and what has to be known of it before it is read."""

    offset: int
    #: How many rows, of 32 bytes each; the content follows them.
    rows: int
    nbytes: int
    gaps: int
    size: int
    #: Between which bytes of the image its bytes lie.
    low: int
    high: int
    checksum: str

    @property
    def length(self) -> int:
        """Bytes of it in the file."""
        return self.rows * 32 + self.size


@dataclass(frozen=True)
class Part:
    """What one rank has written of a version."""

    name: str
    nbytes: int
    messages: tuple[Place, ...]


@dataclass(frozen=True)
class Version:
    """The list of a version."""

    version: int
    #: That it has the differences from; None: it has all bytes.
    base: int | None
    #: The fingerprint of the image.
    image: str
    parts: tuple[Part, ...]
    #: Sums of each whole tensor, see ``sums.py``.
    sums: dict[str, tuple[int, ...]]
    #: Whether a worker with parameters that nothing fills is to refuse it.
    strict: bool


@dataclass(frozen=True)
class Document:
    """What workers go by."""

    version: int
    #: The one before, and the one that leads to ``version``: each begins with a version of all bytes.
    chains: tuple[tuple[str, ...], ...]
    #: Whether the trainer has said that no further version comes.
    over: bool = False

    @classmethod
    def read(cls, directory: Path) -> Document | None:
        """None where there is none yet. Raises CheckpointError for anything else."""
        try:
            found = _read(directory / DOCUMENT, "document")
        except FileNotFoundError:
            return None
        chains = found.get("chains")
        if found.get("format") != FORMAT or not isinstance(chains, list) or not chains:
            raise CheckpointError(f"{directory / DOCUMENT} is no document of a refit of this zerostart")
        made = tuple(tuple(_checked(stem, _STEM) for stem in chain) for chain in chains)
        version = found.get("version")
        if type(version) is not int or not made[-1] or number_of(made[-1][-1]) != version:
            raise CheckpointError(f"{directory / DOCUMENT} names a version that it has no files of")
        return cls(version, made, found.get("over") is True)

    def write(self, directory: Path) -> None:
        """Switch to it. Raises OSError."""
        _write(directory, DOCUMENT, {"format": FORMAT, **asdict(self)})
        sync_directory(directory)


def number_of(stem: str) -> int:
    """The version that files are of."""
    return int(stem[:8])


def write_version(directory: Path, stem: str, version: Version, image: Image) -> None:
    """Write the list of a version whose parts are there. Raises WriteError where one is not, and OSError."""
    for part in version.parts:
        path = directory / part.name
        try:
            size = path.stat().st_size
        except OSError:
            size = -1
        if size != part.nbytes:
            raise WriteError(
                f"{path} is not what a rank has written ({size} bytes and not {part.nbytes}): the directory "
                "has to be one that all ranks share"
            )
    # Messages as rows: of a large model there are many.
    parts = [
        {"name": part.name, "nbytes": part.nbytes, "messages": [astuple(place) for place in part.messages]}
        for part in version.parts
    ]
    data = _bytes({"format": FORMAT, **vars(version), "parts": parts})
    # With a checksum of its own before it: a message that it did not name would not be missed.
    write_whole(directory / f"{stem}.list", _checksum(data) + b"\n" + data, directory / f".{stem}.part")
    if version.base is None:
        write_whole(directory / f"{stem}.image", image.to_bytes(), directory / f".{stem}.part")


def read_version(directory: Path, stem: str) -> Version:
    """The list of a version; raises ReadError for what is none, FileNotFoundError where it is gone."""
    path = directory / f"{stem}.list"
    checksum, _, data = path.read_bytes().partition(b"\n")
    if checksum != _checksum(data):
        raise ReadError(f"{path}: its bytes are not those that were written")
    found = load_json(data, str(path), "list of a version")
    try:
        if found["format"] != FORMAT or found["version"] != number_of(stem):
            raise ValueError("another format, or another version")
        parts = tuple(
            Part(
                _checked(part["name"], _OURS),
                int(part["nbytes"]),
                tuple(Place(*place) for place in part["messages"]),
            )
            for part in found["parts"]
        )
        sums = {str(name): tuple(map(int, row)) for name, row in found["sums"].items()}
        return Version(
            found["version"], found["base"], found["image"], parts, sums, found["strict"] is not False
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ReadError(f"{path} is no list of a version of this zerostart: {error}") from error


def read_image(directory: Path, stem: str, version: Version) -> Image:
    """The image of a version of all bytes; raises as ``read_version``."""
    path = directory / f"{stem}.image"
    image = Image.from_bytes(path.read_bytes())
    if image.fingerprint != version.image:
        raise ReadError(f"{path} is not the image that version {version.version} is of")
    return image


def remove_old(directory: Path, document: Document) -> None:
    """Remove the files of versions that ``document`` does not name, and of those that were never finished.

    Raises nothing: the version is there, and what is left goes with the next one.
    """
    kept = {stem for chain in document.chains for stem in chain}
    _remove(directory, lambda stem: stem not in kept and number_of(stem) <= document.version)


def remove_unfinished(directory: Path, stem: str, document: Document | None) -> None:
    """Remove what there is of a version, unless ``document`` names it; raises nothing."""
    if document is None or not any(stem in chain for chain in document.chains):
        _remove(directory, lambda each: each == stem)


def _remove(directory: Path, unwanted: Callable[[str], bool]) -> None:
    left = []
    try:
        for path in [*directory.iterdir()]:
            match = _OURS.fullmatch(path.name.removeprefix("."))
            if match and unwanted(match["stem"]):
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    left.append(f"{path.name} ({error.strerror})")
    except OSError as error:
        left.append(str(error.strerror))
    if left:
        logger.warning("%s: old versions cannot be removed: %s", directory, ", ".join(left[:3]))


def is_whole(directory: Path, chain: Sequence[str], ranks: int) -> bool:
    """Whether the files of a chain that so many ranks have written are there. Raises OSError."""
    names = {path.name for path in directory.iterdir()}
    wanted = {f"{stem}.list" for stem in chain} | {f"{chain[0]}.image"}
    wanted |= {f"{stem}-{rank:05d}.messages" for stem in chain for rank in range(ranks)}
    return wanted <= names


@contextlib.contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Keep out other trainers of this machine, between looking at the document and writing it.

    Raises ConfigError where another one is about to write. A file system without locks keeps nobody out.
    """
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another trainer writes into {directory}: only one can write there at a time"
            ) from error
        except OSError:
            pass
        yield
    finally:
        os.close(handle)


class PartWriter:
    """The file of one rank, to which messages are added by one thread at a time."""

    def __init__(self, directory: Path, stem: str, rank: int) -> None:
        """Raises WriteError."""
        self._name = f"{stem}-{rank:05d}.messages"
        self._path = directory / self._name
        self._messages: list[Place] = []
        self._size = 0
        try:
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise WriteError(
                f"{self._path} cannot be made by rank {rank}: {error.strerror}; the directory has to be one "
                "that all ranks share"
            ) from error
        self._file = os.fdopen(handle, "wb", buffering=0)

    def add(self, message: Message) -> None:
        """Write a message; raises WriteError."""
        table = message.rows.astype("<i8").tobytes()
        content = memoryview(message.content.numpy().data)
        rows = message.rows
        self._messages.append(
            Place(
                self._size,
                len(rows),
                message.nbytes,
                message.gaps,
                content.nbytes,
                int(rows[:, 0].min()),
                int((rows[:, 0] + (rows[:, 3] - 1) * rows[:, 2] + rows[:, 1]).max()),
                _checksum_of(table, message.content),
            )
        )
        try:
            for data in (memoryview(table), content):
                while data:
                    data = data[self._file.write(data) or 0 :]
        except OSError as error:
            raise WriteError(f"{self._path}: {error.strerror}") from error
        self._size += self._messages[-1].length

    def close(self) -> Part:
        """Bring it to the disk. Raises WriteError."""
        try:
            with self._file:
                os.fsync(self._file.fileno())
        except OSError as error:
            raise WriteError(f"{self._path}: {error.strerror}") from error
        return Part(self._name, self._size, tuple(self._messages))

    def discard(self) -> None:
        """Remove it; raises nothing."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._path.unlink()


def read_messages(directory: Path, part: Part, places: Sequence[Place]) -> Iterator[Message]:
    """The messages at ``places`` of a part, none of which is torn.

    Raises ReadError, naming the file, for bytes that are not those that were written, and FileNotFoundError.
    """
    path = directory / part.name
    with path.open("rb", buffering=0) as file:
        for place in places:
            data = bytearray(place.length)
            view, done = memoryview(data), 0
            file.seek(place.offset)
            while done < len(data) and (count := file.readinto(view[done:])):
                done += count
            table, content = view[: place.rows * 32], torch.frombuffer(data, dtype=torch.uint8)
            content = content[place.rows * 32 :]
            if _checksum_of(table, content) != place.checksum:
                raise ReadError(f"{path}: bytes from {place.offset} on are not those that were written")
            rows = np.frombuffer(table, "<i8").astype(np.int64).reshape(-1, 4)
            yield Message(rows, place.nbytes, place.gaps, content)


def note_follower(directory: Path, name: str, said: JsonObject) -> None:
    """Say what a worker serves. Raises OSError."""
    path = _note(directory, name)
    path.parent.mkdir(exist_ok=True)
    _write(path.parent, path.name, {"name": name, **said})


def still_there(directory: Path, name: str) -> None:
    """Say that a worker still serves what it said last; raises nothing."""
    with contextlib.suppress(OSError):
        os.utime(_note(directory, name))


def remove_follower(directory: Path, name: str) -> None:
    """Say no more what a worker serves; raises nothing."""
    with contextlib.suppress(OSError):
        _note(directory, name).unlink()


def _note(directory: Path, name: str) -> Path:
    safe = re.sub(r"[^\w-]", "_", name, flags=re.ASCII)[:80]
    return directory / FOLLOWERS / f"{safe}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}.json"


def followers(directory: Path) -> list[JsonObject]:
    """What workers have said last; what is none of theirs is passed over.

    The document has just been written. What nobody has seen to for ``AWAY`` seconds before that, by the clock
    of the file system, is of a worker that is gone, and removed.
    """
    found = []
    for path in sorted((directory / FOLLOWERS).glob("*.json")):
        with contextlib.suppress(OSError, CheckpointError):
            gone = path.stat().st_mtime < (directory / DOCUMENT).stat().st_mtime - AWAY
            said = _read(path, "what a worker has said")
            if gone and isinstance(said.get("name"), str) and _note(directory, said["name"]) == path:
                path.unlink()
                continue
            numbers = {"version": (int,), "wanted_bytes": (int,), "seconds": (int, float)}
            # Finite, and of 64 bits at most: what they are added to and converted to has room for them.
            sound = all(
                type(said.get(key)) in types and 0 <= said[key] < 1 << 63 for key, types in numbers.items()
            )
            if isinstance(said.get("name"), str) and sound:
                found.append(said)
    return found


def _read(path: Path, what: str) -> JsonObject:
    """Raises FileNotFoundError where it is not there, else as ``read_json``."""
    try:
        return read_json(path, what, MAX_DOCUMENT_BYTES)
    except ReadError as error:
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
        raise


def _write(directory: Path, name: str, document: JsonObject) -> None:
    write_whole(directory / name, _bytes(document), directory / f".{name}.part")


def _bytes(document: JsonObject) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _checksum_of(table: bytes | memoryview, content: torch.Tensor) -> str:
    """Of a message: a hash of its rows and of the digest of its bytes, which is made much faster."""
    digests = Digests([("content", "U8", content.shape)])
    digests.add("content", 0, content)
    told = hashlib.blake2b(table, digest_size=16)
    told.update(digests.summed()["content"].encode())
    return told.hexdigest()


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).hexdigest().encode()


def _checked(name: object, pattern: re.Pattern[str]) -> str:
    if not isinstance(name, str) or not pattern.fullmatch(name):
        raise CheckpointError(f"{name!r:.80} is no name of a file of a refit")
    return name
