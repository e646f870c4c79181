"""What a store takes: whole objects, and large ones in parts that several processes upload.

A save makes new objects beside old ones, and goes over to them by one of these requests. In which order,
``checkpoint/write/objects.py`` says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO, ClassVar, Final

from zerostart.checkpoint.paths import without_secrets
from zerostart.errors import WriteError, ZerostartError

MiB = 1 << 20
#: Bytes of a part: stores want 5 MiB at least of all but the last, and some want all others of one length.
PART = 8 * MiB
#: What the mark of a large object is called among what a store keeps with it (its metadata).
MARK = "zerostart-save"
#: Most parts of an object.
MOST_PARTS = 10_000


#: What is being done when an object is removed, in words.
REMOVING: Final = "removing"


class TakenError(Exception):
    """The object is not the one that was to be replaced, or there is one where there should be none."""


class GoneError(Exception):
    """There is no such upload: it was aborted, or completed."""


class MayNotRemoveError(WriteError):
    """The credentials do not allow to remove objects."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An object: its length, what tells it from what it is replaced by, and when it was made, in seconds."""

    size: int
    tag: str
    changed: float


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Parts of an object that was not completed, and when that was begun, in seconds of the store's clock."""

    name: str
    upload: str
    begun: float


class Anything:
    """Stands for whatever may be there."""


#: The condition of a request that has none.
ANYTHING: Final = Anything()
#: What is to be replaced: the object of this tag, nothing (None), or whatever is there.
Before = str | None | Anything


@dataclass(frozen=True)
class Uploads(ABC):
    """A directory of a store to which objects are uploaded; plain data that travels from rank to rank.

    Names are paths from ``url``, with slashes. Requests are tried again by the implementation; what fails
    even so is a WriteError that names the object.
    """

    #: Of the directory, without a slash at its end.
    url: str

    #: Whether several processes may upload the parts of one object, in any order; else one has all of it.
    shared: ClassVar[bool] = False
    #: Whether that one puts it together on its disk, since the store takes it whole; else it streams it.
    staged: ClassVar[bool] = False

    def aside(self, folder: str) -> Uploads:
        """The same for a save that has ``folder`` to itself, where objects may lie until they are whole."""
        return self

    @abstractmethod
    def listed(self, folder: str = "") -> dict[str, Stored]:
        """All objects below ``folder``, by name, at any depth."""

    @abstractmethod
    def folders(self, most: int | None = None) -> list[str]:
        """Names of the directories right below this one; perhaps not more than the first ``most``."""

    @abstractmethod
    def read(self, name: str) -> tuple[bytes, str] | None:
        """A small object and its tag; None where there is none."""

    @abstractmethod
    def put(self, name: str, data: bytes, before: Before = ANYTHING) -> str:
        """Make a small object, in one step, and give its tag. Raises TakenError (see ``Before``)."""

    @abstractmethod
    def remove(self, names: Collection[str]) -> None:
        """Remove objects, those that are there. Raises MayNotRemoveError where that is not allowed."""

    @abstractmethod
    def at(self, url: str) -> Uploads:
        """Another directory of the same store."""

    def mark_of(self, name: str) -> str:
        """The mark of the large object at a name; empty where there is none, or none of ours.

        A store that is ``staged`` keeps none.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps no marks")

    # In parts, by several processes: what a store with ``shared`` has.

    def begin(self, name: str, mark: str = "") -> str:
        """Begin an object in parts, which gets ``mark``; what its upload is called by all processes."""
        raise NotImplementedError(f"{type(self).__name__} takes no parts from several processes")

    def part(self, name: str, upload: str, number: int, data: bytes | bytearray) -> str:
        """Upload part ``number`` (from 0 on), and give its receipt. Raises GoneError."""
        raise NotImplementedError(f"{type(self).__name__} takes no parts from several processes")

    def complete(
        self, name: str, upload: str, receipts: Mapping[int, str], mark: str = "", before: Before = ANYTHING
    ) -> None:
        """Make the object of its parts, in one step. Raises TakenError and GoneError.

        An attempt whose answer was lost is told from what others have made by the ``mark``, which no other
        object has.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no parts from several processes")

    def abort(self, name: str, upload: str) -> None:
        """Forget the parts of an upload; one that is not there any more is no error."""
        raise NotImplementedError(f"{type(self).__name__} takes no parts from several processes")

    def unfinished(self) -> list[Unfinished]:
        """Uploads below this directory that were neither completed nor aborted."""
        return []

    # By one process: what a store without ``shared`` has, the first or, where it is ``staged``, the second.

    def stream(self, name: str, pieces: Iterable[bytes | bytearray], mark: str = "") -> None:
        """Make a large object of pieces that come one after the other; none where ``pieces`` raises.

        It gets ``mark``, and so do its copies.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no streams")

    def put_file(self, name: str, file: BinaryIO) -> None:
        """Make a large object of a whole file of this machine, in memory that does not grow with it."""
        raise NotImplementedError(f"{type(self).__name__} takes no whole files")

    def give_name(self, name: str, to: str, before: Before = ANYTHING) -> None:
        """Have a large object be at ``to``, by one request. Raises TakenError (see ``Before``).

        Where it is ``staged`` it is not at ``name`` any more, else it may be.
        """
        raise NotImplementedError(f"{type(self).__name__} takes parts, and gives no names")


def part_bytes(largest: int) -> int:
    """The length of all parts but the last, of a file of ``largest`` bytes and of smaller ones."""
    size = PART
    while size * MOST_PARTS < largest:
        size *= 2
    return size


def parts_of(size: int, part: int) -> Iterator[tuple[int, int]]:
    """Begin and length of each part of a file, in order."""
    for begin in range(0, size, part):
        yield begin, min(part, size - begin)


def told(error: BaseException) -> str:
    """What went wrong, in one line; of an error of ours as it is."""
    if isinstance(error, ZerostartError):
        return str(error)
    return without_secrets(" ".join(f"{error}".split()))[:400]
