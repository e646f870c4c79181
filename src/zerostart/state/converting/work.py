"""What a conversion has written so far: files in a place of their own, and a journal of what is in them.

Everything lies in ``.zerostart/converting`` of the directory that is made. ``plan`` there has the digest of
source, target and files; a journal has, a line each, the units of work that are done with the sums of what
was written. So a conversion that was killed goes on: what its journals say is done is read again, and
counts where the sums are the same. The directory of the files is called by the plan: a rank that lives on,
its leader killed, writes to none of another conversion.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from zerostart.checkpoint.manifest import HIDDEN, MARKER, current
from zerostart.checkpoint.storage.direct import open_direct, whole_pages
from zerostart.checkpoint.storage.files import read_small
from zerostart.checkpoint.storage.page_cache import direct_suits, file_system
from zerostart.checkpoint.write.folders import NO_LINKS, Folder, begin_writeback, lock, sync, write_whole
from zerostart.checkpoint.write.images import Image
from zerostart.checkpoint.write.writer import DIRECT
from zerostart.errors import ReadError, WriteError, ZerostartError

#: The place of a conversion, in the directory that it makes; nothing else there has this name.
PLACE = f"{HIDDEN}/converting"
_PLAN, _FILES, _LOCK = "plan", "files-", "lock"
#: What the plan is called once all files have their names: what is left here is to be removed.
_ENDED = "ended"


class Work:
    """The place of one conversion to the directory ``root``; one process leads those who write there."""

    def __init__(self, root: Path, plan: str = "") -> None:
        """As those see it who write, and do not lead: the files are those of ``plan``."""
        self.root, self.place = root, root / PLACE
        self.plan = plan
        self._made: list[Path] = []
        self._lock = -1

    @classmethod
    def led(cls, root: Path) -> Work:
        """The place, made and locked, of no plan yet.

        Raises OSError, and WriteError where another process converts there.
        """
        work = cls(root)
        # What others have put there is neither written to nor removed by way of a link.
        if link := next((path for path in (work.place.parent, work.place) if path.is_symlink()), None):
            raise WriteError(f"{link} is a link, and what is converted would be written there: remove it")
        work._make()
        # With the lock: who ends removes all of this itself.
        if (ended := work.place / _ENDED).exists():
            work._remove_all()
            ended.unlink()
        return work

    def _make(self) -> None:
        root = self.root
        self._made = [path for path in (root, *root.parents) if not path.exists()]
        self.place.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._lock = os.open(self.place / _LOCK, flags, 0o666)
        if lock(self._lock) is False:
            os.close(self._lock)
            raise WriteError(
                f"{root}: another process is converting to this directory; wait for it, or name another one"
            )

    @property
    def files(self) -> Path:
        """The directory of the files until they get their names."""
        return self.place / f"{_FILES}{self.plan}"

    def has_given(self, name: str) -> bool:
        """Whether the file of this name in the directory is one that this conversion had made when killed."""
        if not self._is_known() or not self._journals():
            return False
        try:
            own = (self.files / name).lstat()
        except FileNotFoundError:  # moved there
            return True
        return os.path.samestat(own, (self.root / name).lstat())

    def _is_known(self) -> bool:
        """Whether a conversion of this plan was killed here."""
        with contextlib.suppress(OSError, ReadError):
            return read_small(str(self.place / _PLAN)).decode("ascii", "replace") == self.plan
        return False

    def begin(self, images: Sequence[Image]) -> dict[int, list[list[int]]]:
        """Make the files, and say which units are done with which sums. Raises OSError.

        The plan is the digest of what is converted to what; where that was another one, what is there goes.
        """
        known = self.place / _PLAN
        if not self._is_known():
            known.unlink(missing_ok=True)
        for left in self.place.glob("archive-*"):  # of a process that was killed over them
            shutil.rmtree(left, ignore_errors=True)
        # Where the plan is the same, so are the bytes of all files, those too of which no journal tells yet:
        # of a conversion without elements none ever does.
        going_on = known.exists()
        done = self._done() if going_on else {}
        if not going_on:
            self._remove_all()
        self.files.mkdir(exist_ok=True)
        for image in images:
            path = self.files / image.name
            if (self.root / image.name).exists() and not path.exists() and going_on:
                continue  # given its name already
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                os.ftruncate(handle, image.size)
                for offset, data in image.literals:
                    write_at(handle, memoryview(data), offset)
            finally:
                os.close(handle)
        write_whole(known, self.plan.encode(), self.place / f"{_PLAN}.part")
        return done

    def allocated(self) -> int:
        """Bytes of the disk that the files take already."""
        every = (path for files in self._all_files() for path in files.rglob("*"))
        return sum(path.lstat().st_blocks * 512 for path in every if path.is_file())

    def _all_files(self) -> list[Path]:
        """The directories of files, of whatever plan."""
        return sorted(self.place.glob(f"{_FILES}*"))

    def _remove_all(self) -> None:
        for journal in self._journals():
            journal.unlink()
        for files in self._all_files():
            shutil.rmtree(files, ignore_errors=True)

    def _journals(self) -> list[Path]:
        return sorted(self.place.glob("journal-*"))

    def _done(self) -> dict[int, list[list[int]]]:
        """By unit, the sums of its parts; a line that a kill has cut off is none."""
        found: dict[int, list[list[int]]] = {}
        for journal in self._journals():
            for line in journal.read_bytes().split(b"\n"):
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    entry = json.loads(line)
                    found[int(entry["unit"])] = [[int(n) for n in sums] for sums in entry["sums"]]
        return found

    def close(self) -> None:
        """Let go of the place, which stays."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def remove(self) -> None:
        """Remove the place with all that is in it; after a kill the next conversion does. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            (self.place / _PLAN).rename(self.place / _ENDED)
        for files in self._all_files():
            shutil.rmtree(files, ignore_errors=True)
        shutil.rmtree(self.place, ignore_errors=True)
        self.close()
        with contextlib.suppress(OSError):
            (self.root / HIDDEN).rmdir()

    def discard_empty(self) -> None:
        """Where nothing was written, remove the place and the directories that were made for it."""
        if self._all_files():
            return
        self.remove()
        for path in self._made:
            with contextlib.suppress(OSError):
                path.rmdir()

    def is_published(self, images: Sequence[Image]) -> bool:
        """Whether the files have all their names, in a directory whose document says so. Raises OSError."""
        with contextlib.suppress(ZerostartError):
            document = current(self.root, MARKER)
            files = {} if document is None else document["files"]
            return all(
                (self.root / image.name).exists() and image.name in files and self.has_given(image.name)
                for image in images
            )
        return False

    def link_into(self, directory: Path, images: Sequence[Image]) -> None:
        """Give each file a second name in ``directory``; where none can have two, its own goes there."""
        for image in images:
            source, target = self.files / image.name, directory / image.name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source, target)
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                source.replace(target)

    def publish(self, images: Sequence[Image]) -> None:
        """Give the files their names, the last one last. Raises OSError, and WriteError for a name taken.

        Each has its bytes on the disk before. After a kill it goes on where it stopped.
        """
        folder = Folder(self.root)
        try:
            for image in images:
                staged = f"{PLACE}/{self.files.name}/{image.name}"
                if folder.identity(staged, regular=True) is not None:
                    sync(self.files / image.name)
            for number, image in enumerate(images):
                if number == len(images) - 1:
                    for parent in dict.fromkeys(PurePosixPath(one.name).parent for one in images):
                        folder.sync((parent / "_").as_posix())
                staged = f"{PLACE}/{self.files.name}/{image.name}"
                if (own := folder.identity(staged, regular=True)) is None:
                    continue
                if folder.identity(image.name) == own:  # killed between its two names
                    folder.remove(staged)
                    continue
                folder.make(PurePosixPath(image.name).parent.as_posix())
                try:
                    folder.put(staged, image.name)
                except FileExistsError as error:
                    raise WriteError(
                        f"{self.root / image.name} is there already, and this conversion would replace it: "
                        "name another directory"
                    ) from error
            folder.sync(images[-1].name)
        finally:
            folder.close()


class Journal:
    """What one process writes of its own work."""

    def __init__(self, place: Path) -> None:
        """Begin a journal in the place of the conversion. Raises OSError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._handle = os.open(place / f"journal-{uuid.uuid4().hex[:12]}", flags, 0o666)

    def note(self, unit: int, sums: Sequence[Sequence[int]]) -> None:
        """Note that a unit is in the files. Raises OSError."""
        line = json.dumps({"unit": unit, "sums": [list(one) for one in sums]}) + "\n"
        write_at(self._handle, memoryview(line.encode()), None)

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)


def write_at(handle: int, data: memoryview, offset: int | None) -> None:
    """Write all of ``data`` at ``offset``, or at the end for None. Raises OSError."""
    while data:
        done = os.write(handle, data) if offset is None else os.pwrite(handle, data, offset)
        data, offset = data[done:], None if offset is None else offset + done


def written(path: Path, offset: int, data: memoryview) -> None:
    """Write into a file that is there, and have the disk follow. Raises OSError.

    Whole pages that lie in memory as in the file go round the page cache, where that pays.
    """
    begin, end = whole_pages(data, offset) if data.nbytes >= DIRECT else (0, 0)
    if begin == end or not _written_round(path, offset + begin, data[begin:end]):
        begin = end = 0
    with opened(path, os.O_WRONLY) as handle:
        for first, last in ((0, begin), (end, data.nbytes)):
            write_at(handle, data[first:last], offset + first)
        if begin == end:
            begin_writeback(handle, offset, offset + data.nbytes)


def _written_round(path: Path, offset: int, data: memoryview) -> bool:
    """Write round the page cache; gives False where the file system takes no such write of these pages."""
    if not direct_suits(_file_system(path.parent)):
        return False
    handle = open_direct(path, os.O_WRONLY | os.O_NOFOLLOW)
    if handle is None:
        return False
    try:
        write_at(handle, data, offset)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the device wants larger blocks
            raise
        return False
    finally:
        os.close(handle)
    return True


@functools.lru_cache(64)
def _file_system(folder: Path) -> str:
    return file_system(folder)


def read_back(path: Path, offset: int, room: memoryview) -> bool:
    """Fill ``room`` from a file; gives False where that has not as many bytes. Raises OSError."""
    with opened(path, os.O_RDONLY) as handle:
        while room:
            done = os.preadv(handle, [room], offset)
            if not done:
                return False
            room, offset = room[done:], offset + done
    return True


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A handle of a file. Raises OSError."""
    handle = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield handle
    finally:
        os.close(handle)
