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
MIN_DIRECT_BYTES = 1 << 20


class FileReader(Reader):
    """Thread-safe reader that opens files on first use.

    ``cold`` prefetches announced reads. ``direct`` bypasses the page cache until a file system refuses it.
    ``states`` are the expected states of the files, () if unknown; they are compared at opening and closing.
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
        self._thread_local = threading.local()
        self._lock = threading.Lock()
        self.cold = cold
        self.direct = direct
        self.is_refused = False  #: True if a file system refused direct reads

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all files. Raises ReadError if a file changed while it was open."""
        # Compare the open files, since their paths may name other files now.
        now = {file: FileState.of(descriptor) for file, descriptor in self._open.items()}
        while self._open:
            os.close(self._open.popitem()[1])
        while self._open_direct:
            descriptor = self._open_direct.popitem()[1]
            if descriptor is not None:
                os.close(descriptor)
        for file, state in now.items():
            if error is None and state != self._states[file]:
                raise self._change_error(file, state, "while it was read, which may be a mixture")

    def read(self, file: int, offset: int, buffers: Sequence[memoryview]) -> None:
        is_large = sum(map(len, buffers)) >= MIN_DIRECT_BYTES
        direct = self._direct_descriptor(file) if self.direct and is_large else None
        self._fill(file, offset, list(buffers), direct)

    def _fill(self, file: int, offset: int, pending: list[memoryview], direct: int | None) -> None:
        descriptor = self._descriptor(file)
        while pending:
            try:
                count = self._read(descriptor, direct, pending, offset)
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
        prefetch(self._descriptor(file), offset, rows)
        gap = rows.stride - rows.width
        if gap > MAX_COPIED_GAP_BYTES:
            super().gather(file, offset, rows, target, step)
            return
        # Each call reads many rows. All gaps go into one small buffer, which stays in the CPU's cache.
        skipped = memoryview(bytearray(gap))
        for first in range(0, rows.count, MAX_ROWS_PER_CALL):
            buffers = []
            for row in range(first, min(first + MAX_ROWS_PER_CALL, rows.count)):
                buffers += [target[row * step : row * step + rows.width], skipped]
            self._fill(file, offset + first * rows.stride, buffers[:-1], None)

    def announce(self, file: int, offset: int, rows: Rows) -> None:
        if self.cold and not self.direct:
            prefetch(self._descriptor(file), offset, rows)

    def describe_reads(self) -> str:
        if self.direct:
            return "bypassing the page cache"
        fallback = "through the page cache, since the file system does not allow direct reads"
        return fallback if self.is_refused else ""

    def _read(self, descriptor: int, direct: int | None, buffers: Sequence[memoryview], offset: int) -> int:
        if direct is not None:
            try:
                return read_direct(direct, buffers, offset, self._bounce())
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._disable_direct()  # some file systems allow O_DIRECT in open but not in reads
        return read_some(descriptor, buffers, offset)

    def _bounce(self) -> mmap.mmap:
        if not hasattr(self._thread_local, "bounce"):
            self._thread_local.bounce = mmap.mmap(-1, BOUNCE_BYTES)  # direct reads need page-aligned memory
        bounce: mmap.mmap = self._thread_local.bounce
        return bounce

    def _direct_descriptor(self, file: int) -> int | None:
        # Two threads must not open the same file twice.
        with self._lock:
            if file not in self._open_direct:
                self._open_direct[file] = descriptor = open_direct(self._files[file])
                if descriptor is None:
                    self._disable_direct()
                else:
                    self._check_unchanged(file, descriptor)
            return self._open_direct[file]

    def _disable_direct(self) -> None:
        self.direct, self.is_refused = False, True

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
                    # The kernel's own read-ahead would also fetch other ranks' bytes.
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
                self._check_unchanged(file, descriptor)
            return self._open[file]

    def _check_unchanged(self, file: int, descriptor: int) -> None:
        """Raise ReadError if the open file has changed."""
        state = FileState.of(descriptor)
        if state.size != self._sizes[file] and file not in self._states:
            self._states[file] = replace(state, size=self._sizes[file])
        if state != self._states.setdefault(file, state):
            raise self._change_error(file, state, "since the checkpoint was opened")

    def _change_error(self, file: int, state: FileState, when: str) -> ReadError:
        return ReadError(
            f"{self._files[file]} was changed {when} (it {self._states[file].changed_to(state)}); load "
            "again when no other process writes to it"
        )


#: Maximum rows of one call: each needs two buffers, and Linux allows 1024 (UIO_MAXIOV).
MAX_ROWS_PER_CALL = 512
#: Maximum gap between rows that is read too, in bytes; beyond it, one call for each row is faster.
MAX_COPIED_GAP_BYTES = 32 << 10
#: Maximum size of one prefetch request, in bytes; the kernel's window is 128 KiB by default.
MAX_PREFETCH_BYTES = 512 << 10


def prefetch(descriptor: int, offset: int, rows: Rows) -> None:
    """Ask the kernel to prefetch the rows."""
    if not hasattr(os, "posix_fadvise"):
        return
    is_whole = rows.stride - rows.width <= FETCHED_GAP
    ranges = [(0, rows.span)] if is_whole else [(n * rows.stride, rows.width) for n in range(rows.count)]
    for start, length in ranges:
        for at in range(start, start + length, MAX_PREFETCH_BYTES):
            os.posix_fadvise(
                descriptor, offset + at, min(MAX_PREFETCH_BYTES, start + length - at), os.POSIX_FADV_WILLNEED
            )
