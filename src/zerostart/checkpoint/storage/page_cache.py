"""What a checkpoint lies on: its file system, and how much of it is in the page cache already."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path

#: File systems whose bytes come over a network or from another machine's cache.
NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "ceph", "beegfs", "glusterfs", "afs", "9p", "virtiofs"}
    | {"fuse", "fuseblk"}
)
#: File systems that keep their files in memory: there is nothing to go round.
MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
_CACHESTAT = 451  # the same on every architecture; Linux 6.5
SAMPLES = 64


def file_system(path: str | os.PathLike[str], mountinfo: str | None = None) -> str:
    """Type of the file system that holds ``path``, such as ``ext4``; "" where the system does not say.

    Source: ``/proc/self/mountinfo``, see proc(5); of several mounts of one device the types agree.
    """
    try:
        number = Path(path).stat().st_dev
        text = Path("/proc/self/mountinfo").read_text() if mountinfo is None else mountinfo
    except OSError:
        return ""
    wanted = f"{os.major(number)}:{os.minor(number)}"
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        if left.split()[2] == wanted:
            return right.split()[0].partition(".")[0]
    return ""


def direct_suits(kind: str) -> bool:
    """Whether reads and writes that go round the page cache may pay on file systems of this type."""
    return bool(kind) and kind not in NETWORK and kind not in MEMORY and hasattr(os, "O_DIRECT")


def resident_share(files: Sequence[str]) -> float:
    """Share of the files' bytes that lies in the page cache, from 0 to 1; 0 where that cannot be known.

    Files that cannot be opened count as absent: what is wrong with them is for the reader to say.
    """
    cached = total = 0.0
    for name in files:
        try:
            descriptor = os.open(name, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError:
            continue
        try:
            size = os.fstat(descriptor).st_size
            total += size
            cached += size * _resident(descriptor, size)
        finally:
            os.close(descriptor)
    return cached / total if total else 0.0


def _resident(descriptor: int, size: int) -> float:
    pages = _cached_pages(descriptor)
    if pages is not None:
        return min(1.0, pages * os.sysconf("SC_PAGE_SIZE") / max(1, size))
    flag = getattr(os, "RWF_NOWAIT", None)
    if flag is None:
        return 0.0
    buffer = bytearray(1)
    found = 0
    for sample in range(SAMPLES):
        try:
            found += os.preadv(descriptor, [buffer], size * sample // SAMPLES, flag)
        except OSError:  # not there without waiting, or the file system does not know the flag
            continue
    return found / SAMPLES


def _cached_pages(descriptor: int) -> int | None:
    """Pages of a file in the page cache, by cachestat(2); None where the kernel lacks or forbids it."""
    if not sys.platform.startswith("linux"):
        return None
    whole = (ctypes.c_uint64 * 2)(0, 0)  # struct cachestat_range: offset, and length 0 for all
    answer = (ctypes.c_uint64 * 5)()  # struct cachestat: cached, dirty, writeback, evicted, recently evicted
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    if call(ctypes.c_long(_CACHESTAT), ctypes.c_uint(descriptor), whole, answer, ctypes.c_uint(0)) != 0:
        return None
    return int(answer[0])
