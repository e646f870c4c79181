"""What this process may use of its machine: processors and memory, by affinity, NUMA and control groups."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
#: More memory than there is: what is available where nothing says how much.
UNKNOWN = 1 << 62


def local_ranks() -> int:
    """Ranks on this machine, as launchers tell in ``LOCAL_WORLD_SIZE``; 1 without it."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(told)) if told.isdecimal() else 1


def machine_name(root: Path = ROOT) -> str:
    """What ranks of one machine have in common, in containers too: the identity of its running kernel."""
    return _text(root / "proc/sys/kernel/random/boot_id") or platform.node()


def files_view(root: Path = ROOT) -> str:
    """What processes have in common to which a path is the same file: the machine, and what is mounted."""
    try:
        mounts = str((root / "proc/self/ns/mnt").readlink())
    except OSError:
        mounts = ""
    return f"{machine_name(root)} {mounts}"


def cores(root: Path = ROOT) -> float:
    """Processors that this process may run on: its affinity, within its control groups' quota."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([float(own), *_quotas(root)])


def available_memory(root: Path = ROOT) -> int:
    """Bytes that this process may still take, of the machine and of its control groups."""
    meminfo = dict(line.split(":", 1) for line in _text(root / "proc/meminfo").splitlines() if ":" in line)
    free = [int(meminfo["MemAvailable"].split()[0]) * 1024] if "MemAvailable" in meminfo else []
    return min([*free, *_memory_left(root)], default=UNKNOWN)


def _quotas(root: Path) -> Iterator[float]:
    for folder in _groups(root):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if quota.isdecimal() and period.strip().isdecimal():
            yield max(1.0, int(quota) / int(period))


def _memory_left(root: Path) -> Iterator[int]:
    for folder in _groups(root):
        most, used = _text(folder / "memory.max"), _text(folder / "memory.current")
        if most.isdecimal() and used.isdecimal():
            cached = re.search(r"^inactive_file (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
            yield max(0, int(most) - int(used) + (int(cached[1]) if cached else 0))


def _groups(root: Path) -> Iterator[Path]:
    base = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            folder = base / line[3:].strip("/")
            yield from (each for each in (folder, *folder.parents) if each == base or base in each.parents)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
