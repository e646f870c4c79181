"""Uploads to Google's and Azure's stores by obstore: each object is streamed by one process.

Of what these stores have for several processes (compositions, lists of blocks) obstore tells nothing.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from zerostart.checkpoint.storage.uploads import (
    ANYTHING,
    MARK,
    PART,
    REMOVING,
    Before,
    MayNotRemoveError,
    Stored,
    TakenError,
    Uploads,
    told,
)
from zerostart.errors import WriteError

T = TypeVar("T")


@dataclass(frozen=True)
class ObstoreUploads(Uploads):
    """See ``Uploads``. ``reach`` gives the store, in any process, and ``root`` is what is before keys."""

    root: str = field(default="", kw_only=True)
    reach: Callable[[], Any] = field(kw_only=True, compare=False, repr=False)

    def at(self, url: str) -> Uploads:
        """See ``Uploads``."""
        return replace(self, url=url.rstrip("/"))

    def listed(self, folder: str = "") -> dict[str, Stored]:
        """See ``Uploads``."""
        begin = self._key(folder) if folder else self._begin.rstrip("/")

        def ask() -> dict[str, Stored]:
            found = {}
            for batch in self._obstore.list(self.reach(), begin or None):
                for one in batch:
                    name = one["path"][len(self._begin) :]
                    found[name] = Stored(one["size"], one["e_tag"] or "", one["last_modified"].timestamp())
            return found

        return self._asked(ask, folder, "listing")

    def folders(self, most: int | None = None) -> list[str]:
        """See ``Uploads``."""
        found = self._asked(
            lambda: self._obstore.list_with_delimiter(self.reach(), self._begin.rstrip("/") or None),
            "",
            "listing",
        )
        return [one[len(self._begin) :].rstrip("/") for one in found["common_prefixes"]]

    def read(self, name: str) -> tuple[bytes, str] | None:
        """See ``Uploads``."""

        def ask() -> tuple[bytes, str] | None:
            try:
                answer = self._obstore.get(self.reach(), self._key(name))
                return bytes(answer.bytes()), answer.meta["e_tag"] or ""
            except FileNotFoundError:
                return None

        return self._asked(ask, name, "reading")

    def mark_of(self, name: str) -> str:
        """See ``Uploads``. A copy has what the object had."""

        def ask() -> str:
            try:
                found = self._obstore.get(self.reach(), self._key(name)).attributes
            except FileNotFoundError:
                return ""
            return str(found.get(MARK, ""))

        return self._asked(ask, name, "looking at")

    def put(self, name: str, data: bytes, before: Before = ANYTHING) -> str:
        """See ``Uploads``."""
        key = self._key(name)
        try:
            mode = self._condition(name, before)
            answer = self._asked(
                lambda: self._obstore.put(self.reach(), key, data, mode=mode, use_multipart=False),
                name,
                "uploading",
            )
        except TakenError:
            # An attempt whose answer was lost has made it: then the next one finds its own object there.
            if (there := self.read(name)) is None or there[0] != data:
                raise
            return there[1]
        return answer["e_tag"] or ""

    def remove(self, names: Collection[str]) -> None:
        """See ``Uploads``."""
        for name in names:
            try:
                delete = functools.partial(self._obstore.delete, self.reach(), self._key(name))
                self._asked(delete, name, REMOVING)
            except FileNotFoundError:
                continue

    def stream(self, name: str, pieces: Iterable[bytes | bytearray], mark: str = "") -> None:
        """See ``Uploads``: obstore aborts an upload whose pieces end with an error."""
        self._asked(
            lambda: self._obstore.put(
                self.reach(),
                self._key(name),
                (bytes(piece) for piece in pieces),
                attributes={MARK: mark} if mark else None,
                chunk_size=PART,
                max_concurrency=2,
                use_multipart=True,
            ),
            name,
            "uploading",
        )

    def give_name(self, name: str, to: str, before: Before = ANYTHING) -> None:
        """See ``Uploads``: a copy. Without a condition for it, what is replaced is looked at before."""
        copy = functools.partial(self._obstore.copy, self.reach(), self._key(name), self._key(to))
        if before is None:
            try:
                self._asked(functools.partial(copy, overwrite=False), to, "copying to")
            except NotImplementedError:
                if self.read(to) is not None:
                    raise TakenError(f"{self.url}/{to}: was made meanwhile") from None
            else:
                return
        elif isinstance(before, str):
            self._condition(to, before)
        self._asked(copy, to, "copying to")

    @property
    def _obstore(self) -> Any:
        import obstore

        return obstore

    @property
    def _begin(self) -> str:
        folder = self.url[len(self.root) :].strip("/")
        return f"{folder}/" if folder else ""

    def _key(self, name: str) -> str:
        return self._begin + name

    def _condition(self, name: str, before: Before) -> Any:
        """The mode of a request that makes an object."""
        if before is None:
            return "create"
        if not isinstance(before, str):
            return "overwrite"
        # Google's condition is a version, which lists do not tell.
        found = self._asked(lambda: self._obstore.head(self.reach(), self._key(name)), name, "looking at")
        if found["e_tag"] != before:
            raise TakenError(f"{self.url}/{name}: was replaced meanwhile")
        return {name: found[name] for name in ("e_tag", "version") if found[name] is not None}

    def _asked(self, ask: Callable[[], T], name: str, doing: str) -> T:
        kinds = self._obstore.exceptions
        where = f"{self.url}/{name}".rstrip("/")
        try:
            return ask()
        except (kinds.AlreadyExistsError, kinds.PreconditionError) as error:
            raise TakenError(f"{where}: {told(error)}") from error
        except kinds.NotSupportedError as error:
            raise NotImplementedError(told(error)) from error
        except FileNotFoundError as error:
            if doing == REMOVING:
                raise
            raise WriteError(f"{doing} {where} failed: {told(error)}") from error
        except (kinds.BaseError, OSError, ValueError, TypeError) as error:
            denied = isinstance(error, (kinds.PermissionDeniedError, kinds.UnauthenticatedError))
            kind = MayNotRemoveError if denied and doing == REMOVING else WriteError
            text = told(error).partition(" Debug source")[0].partition("?")[0]
            raise kind(f"{doing} {where} failed: {text}") from error


class Pieces:
    """Pieces that one thread gives and another takes; the taker fails where the giver does."""

    def __init__(self, depth: int) -> None:
        self._queue: queue.Queue[bytes | bytearray | None] = queue.Queue(depth)
        self._over = threading.Event()
        self._failed: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Have the taker raise ``error``, whatever was given; also one that has not begun, or never will."""
        self._failed = error
        self._over.set()

    def give(self, piece: bytes | bytearray | None) -> bool:
        """Whether the taker has room for a piece: not where it has ended. None is the end of all pieces."""
        while not self._over.is_set():
            try:
                self._queue.put(piece, timeout=0.2)
            except queue.Full:
                continue
            return True
        return False

    def end(self) -> None:
        """Nothing is taken any more."""
        self._over.set()

    def __iter__(self) -> Iterator[bytes | bytearray]:
        while True:
            try:
                piece = self._queue.get(timeout=0.2)
            except queue.Empty:
                piece = b""
            if self._failed is not None:
                raise self._failed
            if piece is None:
                return
            if piece:
                yield piece
