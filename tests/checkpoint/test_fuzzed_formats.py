"""Damaged checkpoints are refused, or read like their libraries do.

``ZEROSTART_FUZZED`` is the number of inputs of the long run, and ``ZEROSTART_SEED`` repeats a run.
"""

import functools
import os
import random
import time
from pathlib import Path

import pytest

from tests.checkpoint.fuzzing import FORMATS, ORACLES, READERS, Files, OracleError, damage, write
from zerostart.errors import ZerostartError, printable

TOTAL = int(os.environ.get("ZEROSTART_FUZZED", "200000"))
#: Inputs of each format in the fast suite, and maximum CPU time of one in seconds.
FAST_INPUTS, MAX_CPU_SECONDS = 25, 5.0


@functools.cache
def example(name: str) -> Files:
    return FORMATS[name]()


def compare_readers(name: str, root: Path) -> str:
    """Describe a difference; "" if none, "-" if refused."""
    started = time.process_time()
    try:
        values = READERS[name](root)
    except ZerostartError as error:
        text = str(error)
        if any(printable(line) != line for line in text.split("\n")) or len(text) > 10_000:
            return f"an error unsafe for terminals: {text[:200]!r}"
        seconds = time.process_time() - started
        return "-" if seconds < MAX_CPU_SECONDS else f"refused after {seconds:.1f} s"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    if name not in ORACLES:
        return ""
    try:
        expected = ORACLES[name](root)
    except OracleError:
        return ""
    except AssertionError as error:
        return str(error)
    unequal = [key for key, value in expected.items() if values.get(key, value) != value]
    return f"other values than its library reads: {unequal[:5]}" if unequal else ""


def fuzz(name: str, count: int, seed: int, root: Path) -> tuple[int, int]:
    """Return the numbers of read and refused inputs."""
    accepted = refused = 0
    for number in range(count):
        files = damage(example(name), random.Random(f"{name} {seed} {number}"))
        difference = compare_readers(name, write(files, root / "c"))
        accepted, refused = accepted + (not difference), refused + (difference == "-")
        assert difference in ("", "-"), f"{name}: ZEROSTART_SEED={seed}, input {number}: {difference}"
    return accepted, refused


@pytest.mark.parametrize("name", FORMATS)
def test_undamaged_checkpoints_are_read(name: str, tmp_path: Path) -> None:
    root = write(example(name), tmp_path / "c")
    if name == "legacy pickle":
        assert compare_readers(name, root) == "-"
        return
    assert compare_readers(name, root) == ""
    if name in ORACLES:  # the oracle must read it, or nothing is compared
        expected = ORACLES[name](root)
        assert expected
        assert READERS[name](root).keys() >= expected.keys()


@pytest.mark.parametrize("name", FORMATS)
def test_some_damaged_checkpoints(name: str, tmp_path: Path) -> None:
    _, refused = fuzz(name, FAST_INPUTS, 0, tmp_path)
    assert refused > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_many_damaged_checkpoints(name: str, tmp_path: Path) -> None:
    seed = int(os.environ.get("ZEROSTART_SEED") or random.SystemRandom().randrange(1 << 32))
    accepted, refused = fuzz(name, -(-TOTAL // len(FORMATS)), seed, tmp_path)
    print(f"{name}: {accepted} read, {refused} refused, ZEROSTART_SEED={seed}")
