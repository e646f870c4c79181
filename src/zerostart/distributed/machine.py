"""Processors and memory that this process may use, within its affinity and control groups."""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import re
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
#: Available memory if the system does not report it, in bytes.
UNKNOWN = 1 << 62


def local_ranks() -> int:
    """Return the number of ranks on this machine, by ``LOCAL_WORLD_SIZE``; 1 without it."""
    size = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(size)) if size.isdecimal() else 1


def seconds_since_start() -> float:
    """Return the age of this process; 0 if the system does not tell."""
    fields = _text(ROOT / "proc/self/stat").rpartition(")")[2].split()
    ticks = int(fields[19]) if fields else 0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK") if ticks else 0.0


def machine_name() -> str:
    """Return the identity of the running kernel, shared by containers."""
    return _text(ROOT / "proc/sys/kernel/random/boot_id") or platform.node()


def describe_mounts() -> str:
    """Return the identity of the machine and its mounted file systems."""
    try:
        mounts = str((ROOT / "proc/self/ns/mnt").readlink())
    except OSError:
        mounts = ""
    return f"{machine_name()} {mounts}"


def cores() -> float:
    """Return the number of usable processors: the affinity, within the control groups' quotas."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([float(own), *_quotas()])


def available_memory() -> int:
    """Return the free memory of the machine and the control groups, in bytes."""
    meminfo = dict(line.split(":", 1) for line in _text(ROOT / "proc/meminfo").splitlines() if ":" in line)
    free = [int(meminfo["MemAvailable"].split()[0]) * 1024] if "MemAvailable" in meminfo else []
    return min([*free, *_memory_left()], default=UNKNOWN)


def _quotas() -> Iterator[float]:
    for folder in _groups():
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if quota.isdecimal() and period.strip().isdecimal():
            yield max(1.0, int(quota) / int(period))


def _memory_left() -> Iterator[int]:
    for folder in _groups():
        most, used = _text(folder / "memory.max"), _text(folder / "memory.current")
        if most.isdecimal() and used.isdecimal():
            cached = re.search(r"^inactive_file (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
            yield max(0, int(most) - int(used) + (int(cached[1]) if cached else 0))


def _groups() -> Iterator[Path]:
    base = ROOT / "sys/fs/cgroup"
    for line in _text(ROOT / "proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            folder = base / line[3:].strip("/")
            yield from (each for each in (folder, *folder.parents) if each == base or base in each.parents)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Suspend garbage collection: plans and imports make many objects and no cycles."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
