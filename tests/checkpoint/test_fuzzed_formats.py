"""Damaged checkpoints of every format: refused with a named error, soon, or read as their own libraries do.

``ZEROSTART_FUZZED`` is the number of inputs of the long run, all formats together; ``ZEROSTART_SEED`` repeats
one. The fast suite has a few that are the same every time.
"""

import functools
import os
import random
import time
from pathlib import Path

import pytest

from tests.checkpoint.fuzzed import FORMATS, ORACLES, OWN, Files, Unread, damaged, write
from zerostart.errors import ZerostartError, printable

TOTAL = int(os.environ.get("ZEROSTART_FUZZED", "200000"))
#: Inputs of each format in the fast suite; the most that one may take, in seconds of the processor.
FEW, SLOWEST = 25, 5.0


@functools.cache
def example(name: str) -> Files:
    return FORMATS[name]()


def differing(name: str, root: Path) -> str:
    """What is wrong with how the checkpoint in ``root`` is taken; empty: nothing, ``-``: it is refused."""
    begun = time.process_time()
    try:
        got = OWN[name](root)
    except ZerostartError as error:
        text = str(error)
        if any(printable(line) != line for line in text.split("\n")) or len(text) > 10_000:
            return f"an error that no terminal should have: {text[:200]!r}"
        seconds = time.process_time() - begun
        return "-" if seconds < SLOWEST else f"refused after {seconds:.1f} s"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    if name not in ORACLES:
        return ""
    try:
        wanted = ORACLES[name](root)
    except Unread:
        return ""
    except AssertionError as error:
        return str(error)
    wrong = [key for key, value in wanted.items() if got.get(key, value) != value]
    return f"other values than its own library has: {wrong[:5]}" if wrong else ""


def fuzz(name: str, count: int, seed: int, root: Path) -> tuple[int, int]:
    """Numbers of inputs that were taken and refused; fails with the seed of the first one that is wrong."""
    taken = refused = 0
    for number in range(count):
        files = damaged(example(name), random.Random(f"{name} {seed} {number}"))
        wrong = differing(name, write(files, root / "c"))
        taken, refused = taken + (not wrong), refused + (wrong == "-")
        assert wrong in ("", "-"), f"{name}: ZEROSTART_SEED={seed}, input {number}: {wrong}"
    return taken, refused


@pytest.mark.parametrize("name", FORMATS)
def test_whole_ones_are_taken(name: str, tmp_path: Path) -> None:
    root = write(example(name), tmp_path / "c")
    if name == "legacy pickle":
        assert differing(name, root) == "-"
        return
    assert differing(name, root) == ""
    if name in ORACLES:  # which read it, too: else nothing would be compared
        wanted = ORACLES[name](root)
        assert wanted
        assert OWN[name](root).keys() >= wanted.keys()


@pytest.mark.parametrize("name", FORMATS)
def test_some_damaged_ones(name: str, tmp_path: Path) -> None:
    _, refused = fuzz(name, FEW, 0, tmp_path)
    assert refused > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_many_damaged_ones(name: str, tmp_path: Path) -> None:
    seed = int(os.environ.get("ZEROSTART_SEED") or random.SystemRandom().randrange(1 << 32))
    taken, refused = fuzz(name, -(-TOTAL // len(FORMATS)), seed, tmp_path)
    print(f"{name}: {taken} taken, {refused} refused, ZEROSTART_SEED={seed}")
