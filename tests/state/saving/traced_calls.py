"""Trace system calls by ``strace``; kill or fail one."""

import ctypes
import os
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

#: Name of a system call, and its number among the calls of a thread.
Point = tuple[str, int]
#: Calls that change files or directories, or flush them to disk.
CALLS = (
    "openat", "mkdir", "mkdirat", "pwrite64", "write", "ftruncate", "fsync", "rename", "renameat", "unlink",
    "unlinkat", "rmdir", "link", "linkat",
)  # fmt: skip
_TRACE_LINE = re.compile(r"(?P<thread>\d+) +(?P<call>\w+)\((?P<arguments>.*)")
_PR_SET_PTRACER, _ANY_PROCESS = 0x59616D61, ctypes.c_ulong(-1)


def tracing_works() -> bool:
    """Return True if strace is allowed to trace."""
    if shutil.which("strace") is None:
        return False
    return (
        subprocess.run(["strace", "-o", os.devnull, "true"], check=False, capture_output=True).returncode == 0
    )


@contextmanager
def traced(log: Path, point: Point | None = None, error: str | None = None) -> Iterator[None]:
    """Trace this process; kill or fail the call at ``point``."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY_PROCESS, 0, 0, 0)  # a child may trace this process
    command = [
        "strace",
        "-f",
        "-y",
        "-qq",
        "-p",
        str(os.getpid()),
        "-o",
        str(log),
        "-e",
        f"trace={','.join(CALLS)}",
    ]
    if point is not None:
        fault = f"error={error}" if error else "signal=KILL"
        command += ["-e", f"inject={point[0]}:{fault}:when={point[1]}"]
    # Open status files now, so that only the body's calls are traced.
    statuses = []
    for thread in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            statuses.append(os.open(thread / "status", os.O_RDONLY))
    tracer = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        _wait_for(tracer, statuses)
        yield
    finally:
        for status in statuses:
            os.close(status)
        tracer.send_signal(signal.SIGINT)  # detaches from this process
        tracer.wait(30)


def _wait_for(tracer: subprocess.Popen[bytes], statuses: list[int]) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and tracer.poll() is None:
        if all(_is_traced(status, tracer) for status in statuses):
            return
        time.sleep(0.01)
    raise RuntimeError(f"strace does not trace: {tracer.stderr and tracer.stderr.read().decode()}")


def _is_traced(status: int, tracer: subprocess.Popen[bytes]) -> bool:
    try:
        return f"TracerPid:\t{tracer.pid}\n".encode() in os.pread(status, 1 << 14, 0)
    except ProcessLookupError:  # the thread has ended
        return True


def points_in(log: Path, folder: Path) -> list[Point]:
    """Return the points of a trace below ``folder``."""
    counts: Counter[tuple[str, str]] = Counter()
    points: dict[Point, None] = {}
    for line in log.read_text(errors="replace").splitlines():
        match = _TRACE_LINE.match(line)
        if match is None:
            continue
        counts[match["thread"], match["call"]] += 1
        changes = match["call"] != "openat" or "O_CREAT" in match["arguments"]
        if changes and str(folder) in match["arguments"]:
            points[match["call"], counts[match["thread"], match["call"]]] = None
    return list(points)
