"""Positioned reads from local files, and gathers of equally spaced rows."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

from zerostart.checkpoint.storage.base import FETCHED_GAP, Reader, Rows
from zerostart.checkpoint.storage.direct import BOUNCE_BYTES, open_direct, read_direct
from zerostart.checkpoint.storage.files import FileState, read_some
from zerostart.errors import CheckpointNotFoundError, ReadError

#: Minimum size of a direct read in bytes; the blocks at the ends of smaller reads cost too much.
LEAST_DIRECT = 1 << 20


class FileReader(Reader):
    """Thread-safe reader that opens files on first use.

    ``cold`` announces reads to the kernel. ``direct`` bypasses the page cache until a file system refuses
    it. ``states`` are the expected states of the files, which are checked again at the end; () if
    unknown.
    """

    def __init__(
        self,
        files: Sequence[str],
        sizes: Sequence[int],
        cold: bool = False,
        direct: bool = False,
        states: Sequence[FileState | None] = (),
    ) -> None:
        self._files = tuple(files)
        self._sizes = tuple(sizes)
        self._states = {number: state for number, state in enumerate(states) if state is not None}
        self._open: dict[int, int] = {}
        self._open_direct: dict[int, int | None] = {}
        self._own = threading.local()
        self._lock = threading.Lock()
        self.cold = cold
        self.direct = direct
        self.refused = False  #: True if a file system refused direct reads

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all files. Raises ReadError if a file was written to meanwhile."""
        # The state of the open files: the path may lead to another file by now.
        now = {file: FileState.of(descriptor) for file, descriptor in self._open.items()}
        while self._open:
            os.close(self._open.popitem()[1])
        while self._open_direct:
            descriptor = self._open_direct.popitem()[1]
            if descriptor is not None:
                os.close(descriptor)
        for file, state in now.items():
            if error is None and state != self._states[file]:
                raise self._changed(file, state, "while it was read, which may be a mixture")

    def read(self, file: int, offset: int, buffers: Sequence[memoryview]) -> None:
        is_large = sum(map(len, buffers)) >= LEAST_DIRECT
        direct = self._direct_descriptor(file) if self.direct and is_large else None
        self._fill(file, offset, list(buffers), direct)

    def _fill(self, file: int, offset: int, pending: list[memoryview], direct: int | None) -> None:
        descriptor = self._descriptor(file)
        while pending:
            try:
                count = self._some(descriptor, direct, pending, offset)
            except OSError as error:
                raise ReadError(
                    f"reading {self._files[file]} at offset {offset} failed: {error.strerror or error}"
                ) from error
            if count == 0:
                raise ReadError(
                    f"{self._files[file]} ended at offset {offset}, where {sum(map(len, pending))} more "
                    f"bytes were expected (its length was {self._sizes[file]}); was it replaced "
                    "during the load?"
                )
            offset += count
            # Drop full buffers; the first other one continues where the short read ended.
            while pending and count >= len(pending[0]):
                count -= len(pending.pop(0))
            if count:
                pending[0] = pending[0][count:]

    def gather(self, file: int, offset: int, rows: Rows, target: memoryview, step: int) -> None:
        advise(self._descriptor(file), offset, rows)
        gap = rows.stride - rows.width
        if gap > MAX_COPIED_GAP_BYTES:
            super().gather(file, offset, rows, target, step)
            return
        # One call reads many rows, and the gaps between them into one buffer that stays in the CPU's cache.
        skipped = memoryview(bytearray(gap))
        for first in range(0, rows.count, MAX_ROWS):
            buffers = []
            for row in range(first, min(first + MAX_ROWS, rows.count)):
                buffers += [target[row * step : row * step + rows.width], skipped]
            self._fill(file, offset + first * rows.stride, buffers[:-1], None)

    def announce(self, file: int, offset: int, rows: Rows) -> None:
        if self.cold and not self.direct:
            advise(self._descriptor(file), offset, rows)

    def note(self) -> str:
        if self.direct:
            return "round the page cache"
        refused = "through the page cache, since the file system takes no reads round it"
        return refused if self.refused else ""

    def _some(self, descriptor: int, direct: int | None, buffers: Sequence[memoryview], offset: int) -> int:
        if direct is not None:
            try:
                return read_direct(direct, buffers, offset, self._bounce())
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._refuse()  # some file systems open such a file but refuse reads
        return read_some(descriptor, buffers, offset)

    def _bounce(self) -> mmap.mmap:
        if not hasattr(self._own, "bounce"):
            self._own.bounce = mmap.mmap(-1, BOUNCE_BYTES)  # a mapping starts at a page
        bounce: mmap.mmap = self._own.bounce
        return bounce

    def _direct_descriptor(self, file: int) -> int | None:
        # The lock ensures that two threads open a new file once.
        with self._lock:
            if file not in self._open_direct:
                self._open_direct[file] = descriptor = open_direct(self._files[file])
                if descriptor is None:
                    self._refuse()
                else:
                    self._check(file, descriptor)
            return self._open_direct[file]

    def _refuse(self) -> None:
        self.direct, self.refused = False, True

    def _descriptor(self, file: int) -> int:
        with self._lock:
            if file not in self._open:
                path = self._files[file]
                try:
                    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
                except FileNotFoundError as error:
                    raise CheckpointNotFoundError(
                        f"{path} was removed after the checkpoint was opened"
                    ) from error
                except OSError as error:
                    raise ReadError(f"{path} cannot be opened: {error.strerror or error}") from error
                self._open[file] = descriptor
                if self.cold and hasattr(os, "posix_fadvise"):
                    # Reads are announced; the kernel's read-ahead would fetch other ranks' bytes.
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
                self._check(file, descriptor)
            return self._open[file]

    def _check(self, file: int, descriptor: int) -> None:
        """Raise ReadError if the open file has changed."""
        state = FileState.of(descriptor)
        if state.size != self._sizes[file] and file not in self._states:
            self._states[file] = replace(state, size=self._sizes[file])
        if state != self._states.setdefault(file, state):
            raise self._changed(file, state, "since the checkpoint was opened")

    def _changed(self, file: int, state: FileState, when: str) -> ReadError:
        return ReadError(
            f"{self._files[file]} was changed {when} (it {self._states[file].changed_to(state)}); load "
            "again when no other process writes to it"
        )


#: Rows of one call, which takes at most 1024 buffers (Linux: UIO_MAXIOV).
MAX_ROWS = 512
#: Largest gap between rows that is copied, in bytes; a call for each row is faster beyond it.
MAX_COPIED_GAP_BYTES = 32 << 10
#: Bytes of one advice; the kernel limits it to its read-ahead window, 128 KiB by default.
ADVICE_BYTES = 512 << 10


def advise(descriptor: int, offset: int, rows: Rows) -> None:
    """Ask the kernel to prefetch the rows."""
    if not hasattr(os, "posix_fadvise"):
        return
    is_whole = rows.stride - rows.width <= FETCHED_GAP
    ranges = [(0, rows.span)] if is_whole else [(n * rows.stride, rows.width) for n in range(rows.count)]
    for start, length in ranges:
        for at in range(start, start + length, ADVICE_BYTES):
            os.posix_fadvise(
                descriptor, offset + at, min(ADVICE_BYTES, start + length - at), os.POSIX_FADV_WILLNEED
            )
