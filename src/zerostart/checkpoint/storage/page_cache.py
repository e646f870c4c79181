"""File system of a checkpoint, and its share in the page cache."""

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
#: File systems in memory, without a page cache to bypass.
MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
SAMPLES = 64


def file_system(path: str | os.PathLike[str]) -> str:
    """Return the file system type, such as ``ext4``.

    Empty if unknown. Source: ``/proc/self/mountinfo``, see proc(5); several mounts of one device have one
    type.
    """
    try:
        number = Path(path).stat().st_dev
        text = Path("/proc/self/mountinfo").read_text()
    except OSError:
        return ""
    device = f"{os.major(number)}:{os.minor(number)}"
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        if left.split()[2] == device:
            return right.split()[0].partition(".")[0]
    return ""


def direct_suits(kind: str) -> bool:
    """Return True if direct access may be faster."""
    return bool(kind) and kind not in NETWORK and kind not in MEMORY and hasattr(os, "O_DIRECT")


def resident_share(files: Sequence[str]) -> float:
    """Sample the share in the page cache, 0 to 1.

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
    count = 0
    for sample in range(SAMPLES):
        # An error means that the page is not there, or that the file system or platform has no such reads.
        with contextlib.suppress(OSError, AttributeError):
            count += os.preadv(descriptor, [bytearray(1)], size * sample // SAMPLES, os.RWF_NOWAIT)
    return count / SAMPLES
