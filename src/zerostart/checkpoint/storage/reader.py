"""Positioned reads from local files, and gathers of rows: runs of a file at equal distances.

A call for each row costs more than copying it, and holds the interpreter's lock besides. So the file's span
is mapped, and ``process_vm_readv`` (Linux; see its manual page) copies up to 1024 rows out of the mapping at
once. Unlike a plain access to the mapping it answers a page that cannot be read with an error and not with a
fatal signal. Where the call is not permitted, each row is read on its own.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

import numpy as np
import numpy.typing as npt

from zerostart.checkpoint.storage.base import Reader, Rows
from zerostart.checkpoint.storage.direct import BOUNCE_BYTES, open_direct, read_direct
from zerostart.checkpoint.storage.files import FileState, read_some
from zerostart.errors import CheckpointNotFoundError, ReadError

#: Reads below this many bytes always go through the page cache: the blocks at their ends would weigh.
LEAST_DIRECT = 1 << 20


class FileReader(Reader):
    """Opens files on first use and reads ranges of them into buffers; safe to share between threads.

    ``cold`` has the kernel told what will be read. With ``direct`` reads go round the page cache, until a
    file system does not take that. ``states`` are what the files have to be found in (() where nobody knows),
    and to be in still when all is read.
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
        self.refused = False  #: whether a file system did not take reads round the page cache

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all files. Raises ReadError if one of them was written to meanwhile."""
        # Asked of the open files, before they are closed: the path may lead to another file by now.
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
        descriptor = self._descriptor(file)
        left = list(buffers)
        wanted = sum(map(len, left))
        direct = self._direct_descriptor(file) if self.direct and wanted >= LEAST_DIRECT else None
        while left:
            try:
                count = self._some(descriptor, direct, left, offset)
            except OSError as error:
                raise ReadError(
                    f"reading {self._files[file]} at offset {offset} failed: {error.strerror or error}"
                ) from error
            if count == 0:
                raise ReadError(
                    f"{self._files[file]} ended at offset {offset}, where {sum(map(len, left))} more bytes "
                    f"were expected (its length was {self._sizes[file]}); was it replaced during the load?"
                )
            offset += count
            # Buffers that are full go; the first that is not begins where the short read has ended.
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]

    def gather(self, file: int, offset: int, rows: Rows, target: memoryview, step: int) -> None:
        descriptor = self._descriptor(file)
        advise(descriptor, offset, rows)
        # What the vectored call has left is read row by row, which also tells why it could not be copied.
        for row in range(gather(descriptor, offset, rows, target, step), rows.count):
            self.read(file, offset + row * rows.stride, [target[row * step : row * step + rows.width]])

    def announce(self, file: int, offset: int, rows: Rows) -> None:
        if self.cold and not self.direct:
            advise(self._descriptor(file), offset, rows)

    def note(self) -> str:
        if self.direct:
            return "round the page cache"
        refused = "through the page cache, since the file system takes no reads round it"
        return refused if self.refused else ""

    def _some(self, descriptor: int, direct: int | None, buffers: Sequence[memoryview], offset: int) -> int:
        """Read some bytes, through the page cache or round it."""
        if direct is not None:
            try:
                return read_direct(direct, buffers, offset, self._bounce())
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._refuse()  # some file systems open such a file, and then take no read of it
        return read_some(descriptor, buffers, offset)

    def _bounce(self) -> mmap.mmap:
        if not hasattr(self._own, "bounce"):
            self._own.bounce = mmap.mmap(-1, BOUNCE_BYTES)  # a mapping starts at a page
        bounce: mmap.mmap = self._own.bounce
        return bounce

    def _direct_descriptor(self, file: int) -> int | None:
        # Under the lock, so that two threads that ask for a new file open it once.
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
                    # What will be read is announced: reading ahead of it would fetch other ranks' bytes.
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
                self._check(file, descriptor)
            return self._open[file]

    def _check(self, file: int, descriptor: int) -> None:
        """Raise ReadError unless an open file is the one whose header was read, and as it was then."""
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


#: Most vectors that one call takes (Linux: UIO_MAXIOV).
MOST = 1024
#: The kernel limits one advice to its read-ahead window, 128 KiB unless it is set otherwise.
ADVICE = 512 << 10

Vectors = npt.NDArray[np.uint64]


def advise(descriptor: int, offset: int, rows: Rows) -> None:
    """Ask the kernel to fetch the rows into the page cache; costs little where they are in it."""
    if not hasattr(os, "posix_fadvise"):
        return
    for start, length in rows.extents():
        for at in range(start, start + length, ADVICE):
            os.posix_fadvise(
                descriptor, offset + at, min(ADVICE, start + length - at), os.POSIX_FADV_WILLNEED
            )


def gather(descriptor: int, offset: int, rows: Rows, target: memoryview, step: int) -> int:
    """Copy the first rows into ``target``, ``step`` bytes from start to start; returns how many it could.

    A caller reads the others one by one, and learns from that why they could not be copied.
    """
    if not vectored():
        return 0
    # A mapping begins at a page: so it begins before the rows, by `shift` bytes.
    shift = offset % mmap.ALLOCATIONGRANULARITY
    try:
        mapping = mmap.mmap(
            descriptor, shift + rows.span, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset - shift
        )
    except (OSError, ValueError):  # no mappings on this file system, or the file is shorter now
        return 0
    with mapping:
        if hasattr(mmap, "MADV_RANDOM"):
            mapping.madvise(mmap.MADV_RANDOM)  # else the kernel reads around each page that is absent
        source = np.frombuffer(mapping, np.uint8)
        begin = source.ctypes.data + shift
        place = np.frombuffer(target, np.uint8).ctypes.data
        done = 0
        while done < rows.count:
            count = min(MOST, rows.count - done)
            got = _copy(
                _vectors(begin + done * rows.stride, rows.stride, rows.width, count),
                _vectors(place + done * step, step, rows.width, count),
            )
            done += got // rows.width
            if got < count * rows.width:
                break
        del source  # a mapping cannot be closed while it is looked at
    return done


def _vectors(start: int, stride: int, width: int, count: int) -> Vectors:
    """``count`` times ``struct iovec {address, length}``; one if they follow each other."""
    if stride == width:
        return np.array([[start, count * width]], np.uint64)
    table = np.empty((count, 2), np.uint64)
    table[:, 0] = np.arange(start, start + count * stride, stride, dtype=np.uint64)
    table[:, 1] = width
    return table


def _copy(source: Vectors, target: Vectors) -> int:
    """Bytes copied within this process, 0 if none could be."""
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    call.restype = ctypes.c_ssize_t
    got = call(
        ctypes.c_int(os.getpid()),
        ctypes.c_void_p(target.ctypes.data),
        ctypes.c_ulong(len(target)),
        ctypes.c_void_p(source.ctypes.data),
        ctypes.c_ulong(len(source)),
        ctypes.c_ulong(0),
    )
    return max(0, int(got))


@functools.cache
def vectored() -> bool:
    """Whether ``process_vm_readv`` is there and permitted on this process itself."""
    if not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "process_vm_readv"):
        return False
    source, target = np.ones(1, np.uint8), np.zeros(1, np.uint8)
    one = [np.array([[a.ctypes.data, 1]], np.uint64) for a in (source, target)]
    # Tried, and not looked up: sandboxes forbid the call (seccomp), and some pretend that it went well.
    return _copy(one[0], one[1]) == 1 and ctypes.get_errno() != errno.ENOSYS and bool(target[0])
