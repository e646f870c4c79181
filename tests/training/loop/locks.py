"""Locks that another process holds."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SCRIPT = """
import fcntl, sys
file = open(sys.argv[1], "ab")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold the lock ``path`` in another process, which is killed at the end."""
    with subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline()
        yield
        other.kill()
