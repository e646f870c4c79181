"""A worker's side of a directory of versions: it follows at its own pace, from whatever it has."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from zerostart.checkpoint.digest import Digests
from zerostart.checkpoint.memory import MemoryReader
from zerostart.checkpoint.storage import Reader
from zerostart.errors import CheckpointError, PeerError, ReadError, VerifyError, ZerostartError
from zerostart.state.refitting.changes import Blocks, Changed
from zerostart.state.refitting.directory import (
    LOOKS,
    Document,
    Version,
    note_follower,
    number_of,
    read_image,
    read_messages,
    read_version,
    remove_follower,
    still_there,
)
from zerostart.state.refitting.image import Image
from zerostart.state.refitting.messages import take
from zerostart.state.refitting.receiver import Receiver, Wants, sum_read
from zerostart.state.refitting.sums import Sums, Tensors, differing, digest_of
from zerostart.state.refitting.transports.base import Closed
from zerostart.state.refitting.transports.spool import Spool
from zerostart.transfer.planning.runs import Runs

logger = logging.getLogger("zerostart")


class Follower:
    """One worker of a directory, as ``serve`` uses it; it runs in no thread of its own.

    What it wants of a version is put together in a spool, checked, and only then filled into the engine.
    """

    def __init__(self, receiver: Receiver, path: Path, timeout: float) -> None:
        """Raises PeerError where no trainer has written a version within ``timeout`` seconds."""
        self.receiver = receiver
        self.name = receiver.name or f"{socket.gethostname()}-{os.getpid()}"
        self._path, self._timeout = path, timeout
        self._spool: Spool | None = None
        self._blocks = Blocks(0)
        self._image: Image | None = None
        self._wants: Wants | None = None
        #: The files of the version that the spool has whole, and the version that the engine has of it.
        self._whole: str | None = None
        self._since: int | None = None
        #: The files of the version that was served, or that failed: nothing is new until there are others.
        self._seen: str | None = None
        #: What cannot be followed, as it was said last; and when the note of what is served was seen to.
        self._trouble = ""
        self._noted = time.monotonic()
        until = time.monotonic() + timeout
        while self._document() is None:
            if time.monotonic() > until:
                why = f": {self._trouble}" if self._trouble else ""
                raise PeerError(f"no trainer has written a version into {path} within {timeout:.0f} s{why}")
            time.sleep(0.1)

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def is_lost(self) -> bool:
        """Never: another trainer may go on in the directory."""
        return False

    def pending(self, seconds: float = 0.0) -> bool:
        """Whether there is a version to follow, or the end of all, within so many seconds."""
        until = time.monotonic() + seconds
        while True:
            document = self._document()
            if document is not None and (document.over or document.chains[-1][-1] != self._seen):
                return True
            if time.monotonic() > self._noted + LOOKS:
                self._noted = time.monotonic()
                still_there(self._path, self.name)
            left = until - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(0.1, left))

    def follow(self, timeout: float | None = None) -> int:
        """Serve the newest version, which is there within ``timeout`` seconds; gives it.

        Raises Closed where the trainer has ended and its last version is served, PeerError where none comes,
        ReadError and VerifyError where what is there is not what was written, or cannot be read for ``LOOKS``
        seconds, and what the engine raises; the engine then has the version before, or none where
        ``receiver.version`` is None.
        """
        if not self.pending(self._timeout if timeout is None else timeout):
            raise PeerError(f"no further version has come into {self._path}")
        until: float | None = None  # of what cannot be read, from when that has been seen on
        while True:
            document = Document.read(self._path)
            if document is None:
                raise ReadError(f"{self._path} has no document any more: it is no directory of a refit")
            newest = document.chains[-1][-1]
            if newest == self._seen:
                raise Closed(f"the trainer has closed the refit in {self._path}; no further version comes")
            try:
                self._follow(document)
            except OSError as error:
                if isinstance(error, ZerostartError):
                    self._seen = newest
                    raise
                # Old versions go when newer ones are there: on with these, from the beginning.
                again = Document.read(self._path)
                if again is None or again.chains == document.chains:
                    until = until or time.monotonic() + LOOKS
                    if time.monotonic() < until:  # a file system that others share is late, or away
                        time.sleep(0.1)
                        continue
                    self._seen = newest
                    gone = isinstance(error, FileNotFoundError)
                    why = f"{error.filename} is missing, and no newer version is there" if gone else error
                    raise ReadError(f"{self._path}: {why}") from error
                # Said, since it may be so each time.
                logger.warning(
                    "%s: version %s went before %s had read it, which goes on with version %s: push more "
                    "rarely, or with full_every=, where it cannot keep up",
                    *(self._path, document.version, self.name, again.version),
                )
            except BaseException:
                self._seen = newest
                raise
            else:
                self._seen = newest
                return document.version

    def close(self) -> None:
        """Give the spool back, and say no more that a version is served; raises nothing."""
        if self._since is not None:
            remove_follower(self._path, self.name)
        self._release()

    def _release(self) -> None:
        self._whole = self._since = None
        if self._spool is not None:
            self._spool.close()
        self._spool = None

    def _document(self) -> Document | None:
        """The document as it is now; None also where it cannot be read, or is none that can be followed."""
        try:
            document = Document.read(self._path)
        except (ReadError, OSError):  # a file system that others share may be away for a moment
            return None
        except CheckpointError as error:  # of another zerostart: what is served goes on being served
            if str(error) != self._trouble:
                self._trouble = str(error)
                logger.warning("%s: %s waits for one that it can follow", error, self.name)
            return None
        self._trouble = ""
        return document

    # What ``Receiver.fill`` reads from.

    def reader(self) -> Reader:
        """Of the spool."""
        assert self._spool is not None, "brought to a version before"
        return MemoryReader([self._spool.data])

    def changed(self, since: int) -> Changed:
        """By the messages that were read."""
        return self._blocks.since(since)

    def prepare(self, version: int, check: Callable[[], None]) -> None:
        """Nothing: the version is read before it is filled in."""

    def done(self) -> None:
        """The spool stays for the next version."""

    def _follow(self, document: Document) -> None:
        begun = time.monotonic()
        chain = document.chains[-1]
        try:
            last, sums = self._brought(chain)
        except (ReadError, VerifyError, ValueError, IndexError, RuntimeError) as error:
            self._whole = None
            logger.warning("%s: %s reads all of version %s anew", error, self.name, document.version)
            last, sums = self._brought(chain)
        assert self._image is not None, "brought to a version before"
        assert self._wants is not None, "known with the image"
        self.receiver.renew(self._image, self._wants)
        since, self._since = self._since, None
        self.receiver.fill(self, last.version, sums, since)
        self._since = last.version
        said = {
            "version": last.version,
            "wanted_bytes": self._wants.runs.nbytes,
            "seconds": time.monotonic() - begun,
            "digest": digest_of(sums),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        # A directory that can only be read from is followed all the same.
        with contextlib.suppress(OSError):
            note_follower(self._path, self.name, said)

    def _brought(self, chain: tuple[str, ...]) -> tuple[Version, list[Sums]]:
        """Bring the spool to the end of a chain; gives that version, and the sums of what is wanted."""
        last = self._bring(chain)
        assert self._wants is not None, "known with the image"
        sums = [self._summed(runs) for runs in self._wants.sets]
        self._check(sums, last)
        return last, sums

    def _bring(self, chain: tuple[str, ...]) -> Version:
        """Bring the spool to the end of a chain, from where it is in it, or from its beginning."""
        at = chain.index(self._whole) + 1 if self._whole in chain else 0
        last = None
        for stem in chain[at:]:
            last = read_version(self._path, stem)
            if last.base is None:
                self._begin(stem, last)
            elif self._whole is None or number_of(self._whole) != last.base:
                raise ReadError(
                    f"{self._path}: version {last.version} differs from {last.base}, which is not there"
                )
            self._whole = None
            self._take(last)
            self._whole = stem
        return last or read_version(self._path, chain[-1])

    def _begin(self, stem: str, version: Version) -> None:
        """Have a spool for a version of all bytes."""
        image = read_image(self._path, stem, version)
        if self._image is None or self._image.fingerprint != image.fingerprint or self._wants is None:
            self._release()
            self._image, self._wants = image, self.receiver.plan(image, strict=version.strict)
        if self._spool is None:
            self._since = None
            self._spool = Spool(image.nbytes, self._wants.runs, "what is read of the versions")
            self._blocks = Blocks(image.nbytes)

    def _take(self, version: Version) -> None:
        """Put into the spool what it wants of a version."""
        assert self._spool is not None, "begun with the first version of the chain"
        for part in version.parts:
            places = [
                place for place in part.messages if self._spool.runs.within(place.low, place.high).nbytes
            ]
            for message in read_messages(self._path, part, places):
                take(message, self._spool, self._blocks, version.version, version.base is not None, part=True)

    def _summed(self, runs: Runs) -> Sums:
        """The sums of one of the sets that the engine's tensors are read back by."""
        assert self._image is not None, "known with what is wanted of it"
        entries = {name: (name, dtype, shape) for name, dtype, shape in self._image.entries}
        digests = Digests(entries[name] for name in Tensors(self._image).names(runs))
        with self.reader() as reader:
            sum_read(self._image, runs, reader, digests)
        return digests.sums()

    def _check(self, sums: list[Sums], version: Version) -> None:
        """Raise VerifyError where a tensor that is wanted whole is not the trainer's."""
        for each in sums:
            whole = {name: row for name, row in each.items() if row[-1] == version.sums[name][-1]}
            if names := differing({name: version.sums[name] for name in whole}, whole):
                raise VerifyError(
                    f"{self._path}: version {version.version} is not what the trainer had in "
                    f"{', '.join(names[:8])}; push again"
                )
