"""What a checkpoint lies on: its file system, and how much of it is in the page cache already."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

#: File systems whose bytes come over a network or from another machine's cache.
NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "ceph", "beegfs", "glusterfs", "afs", "9p", "virtiofs"}
    | {"fuse", "fuseblk"}
)
#: File systems that keep their files in memory: there is nothing to go round.
MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
SAMPLES = 64


def file_system(path: str | os.PathLike[str]) -> str:
    """Type of the file system that holds ``path``, such as ``ext4``; "" where the system does not say.

    Source: ``/proc/self/mountinfo``, see proc(5); of several mounts of one device the types agree.
    """
    try:
        number = Path(path).stat().st_dev
        text = Path("/proc/self/mountinfo").read_text()
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
    """Return the share of bytes in the page cache, from 0 to 1, by samples that are read without waiting.

    Files that cannot be opened count as absent: the reader raises the error.
    """
    cached = total = 0.0
    for name in files:
        with contextlib.suppress(OSError), open(name, "rb", buffering=0) as file:  # noqa: PTH123
            size = os.fstat(file.fileno()).st_size
            total += size
            cached += size * _resident(file.fileno(), size)
    return cached / total if total else 0.0


def _resident(descriptor: int, size: int) -> float:
    found = 0
    for sample in range(SAMPLES):
        # An error means that the page is not there, or that the file system or platform has no such reads.
        with contextlib.suppress(OSError, AttributeError):
            found += os.preadv(descriptor, [bytearray(1)], size * sample // SAMPLES, os.RWF_NOWAIT)
    return found / SAMPLES
