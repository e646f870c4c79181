"""The trainer's side of a directory of versions: each push writes one, and waits for nobody."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from torch import nn

from zerostart.distributed.world import World, current_world, default_device
from zerostart.errors import CheckpointError, ConfigError, WriteError
from zerostart.state.refitting.directory import (
    Document,
    PartWriter,
    Version,
    alone,
    followers,
    is_whole,
    new_stem,
    remove_old,
    remove_unfinished,
    write_version,
)
from zerostart.state.refitting.image import Image
from zerostart.state.refitting.messages import MESSAGE, Packer, Sender
from zerostart.state.refitting.pushes import (
    Prepared,
    Pushing,
    PushReport,
    RefitSettings,
    WorkerReport,
    prepared,
    timed,
)
from zerostart.state.refitting.sums import SetSums
from zerostart.state.refitting.transports.spool import Spool
from zerostart.transfer.meter import PeakMeter
from zerostart.transfer.planning.runs import Runs
from zerostart.transfer.tuning import push_threads
from zerostart.transfer.writing import write_out

#: Of a push into a directory.
NAME = "file"


class DirectoryRefitter:
    """Writes versions of a model's weights into a directory; every rank has one, see ``zerostart.refit``."""

    def __init__(
        self, model: nn.Module, path: Path, settings: RefitSettings, world: World | None = None
    ) -> None:
        """Collective. Raises as ``zerostart.refit``; WriteError where the directory cannot be made."""
        self._model, self._settings, self._path = model, settings, path
        self._world = world = world or current_world()
        self.address = path.as_uri()
        self._image: Image | None = None
        self._kept: Spool | None = None
        #: Whether what is kept is the version that the document names, and how many versions ago all was
        #: written.
        self._whole, self._deltas = False, 0
        self._closed = False
        #: On rank 0 the document of the last push, which may be there though the push has failed.
        self._tried: Document | None = None
        #: On rank 0 the files of a push that is under way or has failed: they take room that others need.
        self._stem: str | None = None
        with world.phase("beginning a refit"):
            settings.check()
            if settings.workers is not None:
                raise ConfigError(
                    "workers= is of no use with a directory: no push waits for any; leave it out"
                )
            self._document: Document | None = world.broadcast_object(self._begin, "looking at the directory")
        #: Goes on where another trainer has ended.
        self.version = 0 if self._document is None else self._document.version

    def __enter__(self) -> DirectoryRefitter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._release()

    def push(self, wait: bool = True) -> PushReport | Pushing:
        """Write a version of the weights as they are now; collective.

        Workers follow at their own pace: the report says what each has served last. With ``wait=False`` the
        same, with a handle. Raises, the same on every rank: WriteError where something cannot be written, and
        ConfigError where another trainer writes there; the directory then has the version before.
        """
        if self._closed:
            raise ConfigError("this refit is closed: call zerostart.refit again")
        world, begun = self._world, time.perf_counter()
        phases: dict[str, float] = {}
        whole, self._whole = self._whole, False
        with PeakMeter(default_device()) as meter, world.phase("writing a version into a directory"):
            with timed(phases, "plan"):
                ready = prepared(self._model, self._settings, world, self._image)
                same, self._image = ready.image is self._image, ready.image
                own, kept = self._keep(ready)
                delta = whole and same and self._deltas + 1 < self._settings.full_every
                delta = delta and all(world.all_gather_object(kept, "looking at what is kept"))
            number, stem, delta = world.broadcast_object(lambda: self._next(delta), "naming a version")
            written = _Written(self._path, stem, world.rank)
            try:
                with timed(phases, "write"):
                    sums = self._write(ready, own, delta, written)
                    parts = world.all_gather_object(written.part.close(), "listing a version")
                    base = number - 1 if delta else None
                    version = Version(
                        number,
                        base,
                        ready.image.fingerprint,
                        tuple(parts),
                        sums,
                        self._settings.strict,
                    )
            except BaseException:
                written.part.discard()
                raise
            with timed(phases, "agree"):
                # What fails from here on may be there all the same: nothing is taken back.
                self._document = world.broadcast_object(
                    lambda: self._publish(stem, version, ready.image), "publishing a version"
                )
        self.version, self._whole, self._deltas = number, True, self._deltas + 1 if delta else 0
        phases["total"] = time.perf_counter() - begun
        figures = world.all_gather_object(
            (
                phases,
                written.changed,
                meter.host_bytes,
                meter.device_bytes or 0,
                0 if self._kept is None else self._kept.runs.nbytes,
            ),
            "figures of a push",
        )
        said = world.broadcast_object(lambda: followers(self._path), "looking who follows")
        owned = ready.image.layout.total_size
        report = PushReport(
            number,
            version.base,
            NAME,
            {key: max(each[0][key] for each in figures) for key in phases},
            owned,
            sum(each[1] for each in figures) if delta else owned,
            sum(part.nbytes for part in version.parts),
            sum(int(each.get("wanted_bytes", 0)) for each in said),
            max(each[4] for each in figures),
            max(each[2] for each in figures),
            max(each[3] for each in figures),
            tuple(
                WorkerReport(
                    each["name"],
                    each["version"],
                    int(each.get("wanted_bytes", 0)),
                    float(each.get("seconds", 0.0)),
                    str(each.get("digest")),
                )
                for each in said
            ),
        )
        return report if wait else Pushing(world, lambda: report)

    def close(self) -> None:
        """Say that no further version comes; collective. The newest one stays for those who come later."""

        def say() -> None:
            if self._document is None and self._tried is None:
                return
            try:
                with alone(self._path):
                    document = self._current()
                    self._clear(document)
                    if document is not None:
                        replace(document, over=True).write(self._path)
            except (CheckpointError, ConfigError, FileNotFoundError):
                pass  # another trainer goes on there, or nobody does
            except OSError as error:
                raise WriteError(f"{self._path}: {error.strerror or error}") from error

        if not self._closed:
            self._closed = True
            try:
                self._world.broadcast_object(say, "closing a refit")
            finally:
                self._release()

    def _release(self) -> None:
        self._closed = True
        if self._kept is not None:
            self._kept.close()
        self._kept = None

    def _begin(self) -> Document | None:
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            return Document.read(self._path)
        except OSError as error:
            raise WriteError(f"{self._path} cannot be used as a directory: {error.strerror}") from error

    def _current(self) -> Document | None:
        """On rank 0: the document to go on from; raises ConfigError where it is another trainer's."""
        there = Document.read(self._path)
        if there is not None and self._tried is not None and there.chains == self._tried.chains:
            self._document = self._tried
        if there is None:  # somebody has emptied the directory
            self._document = None
        elif self._document is None or there.chains != self._document.chains:
            raise ConfigError(
                f"{self._path} has a version {there.version} that this trainer has not written: only one "
                "can write there at a time"
            )
        return self._document

    def _next(self, delta: bool) -> tuple[int, str, bool]:
        """On rank 0: number and name of the next version, and whether it can be a ``delta``."""
        try:
            before = self._current()
            self._clear(before)
            number = 1 + max(self.version, 0 if before is None else before.version)
            if before is None or number != before.version + 1:
                delta = False
            else:
                delta = delta and is_whole(self._path, before.chains[-1], self._world.size)
        except OSError as error:
            raise WriteError(f"{self._path}: {error.strerror or error}") from error
        self._stem = new_stem(number)
        return number, self._stem, delta

    def _clear(self, document: Document | None) -> None:
        """On rank 0: remove what a push has left that failed when all ranks had written."""
        if self._stem is not None:
            remove_unfinished(self._path, self._stem, document)
        self._stem = None

    def _keep(self, ready: Prepared) -> tuple[Runs, bool]:
        """Have room for what this rank writes, where deltas are asked for.

        Gives the bytes that it writes, and whether it has those of the version before.
        """
        own = Runs.of_writes(ready.plan, ready.image.layout)
        kept = self._kept
        if self._settings.full_every == 1:
            return own, False
        if kept is not None and kept.is_for(ready.image.nbytes, own):
            return own, True
        if kept is not None:
            kept.close()
        self._kept = None
        self._kept = Spool(ready.image.nbytes, own, "what a push has written, which deltas are found by,")
        return own, False

    def _write(
        self, ready: Prepared, own: Runs, delta: bool, written: _Written
    ) -> dict[str, tuple[int, ...]]:
        """This rank's part of a version; gives the sums of all ranks'."""
        packer = Packer(MESSAGE, delta, written.part.add)
        sender = Sender(ready.image, [(own, packer)], self._kept, delta, written.note)
        tensors = [(entry.offset, entry.nbytes, 0, 1) for entry in ready.image.layout.tensors.values()]
        sums = SetSums(ready.image, [Runs.of(tensors)])
        write_out(ready.plan, ready.storages, sender, push_threads(), sums.add_rows)
        packer.end()
        return sums.summed(self._world)[0]

    def _publish(self, stem: str, version: Version, image: Image) -> Document:
        """On rank 0, with all parts there: the list, the switch, and what is not needed any more."""
        try:
            with alone(self._path):
                before = self._current()
                write_version(self._path, stem, version, image)
                chains = () if before is None else before.chains
                if version.base is None:
                    chains = (*chains[-1:], (stem,))
                else:
                    chains = (*chains[:-1], (*chains[-1], stem))
                self._tried = document = Document(version.version, chains)
                document.write(self._path)
                self._stem = None
                remove_old(self._path, document)
        except OSError as error:
            raise WriteError(f"{self._path}: {error.strerror or error}") from error
        return document


class _Written:
    """What this rank writes of a version."""

    def __init__(self, path: Path, stem: str, rank: int) -> None:
        self.part = PartWriter(path, stem, rank)
        self.changed = 0
        self._lock = threading.Lock()

    def note(self, nbytes: int) -> None:
        """So many bytes have changed."""
        with self._lock:
            self.changed += nbytes
