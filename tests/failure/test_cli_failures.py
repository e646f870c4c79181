"""The command line on failure: one clear line, exit code 1, no traceback unless asked for, within 30 s."""

import os
import subprocess
import sysconfig
import time
from pathlib import Path

import pytest

from tests.failure.broken import broken_copy
from tests.tiny import TinyCheckpoints

LIMIT = 30.0
ZEROSTART = Path(sysconfig.get_path("scripts")) / "zerostart"

#: Imported by every Python process that has its folder in PYTHONPATH: ends rank 1 at its first weights.
KILL_RANK_1 = """
import os, signal
if os.environ.get("RANK") == "1":
    os.preadv = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def source(checkpoints: TinyCheckpoints) -> Path:
    return checkpoints("qwen3_moe", sharded=True)


def zerostart(*arguments: object, **environment: str) -> tuple[subprocess.CompletedProcess[str], float]:
    started = time.monotonic()
    done = subprocess.run(
        [ZEROSTART, *map(str, arguments)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done, time.monotonic() - started


def failed_with_one_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    everything = done.stdout + done.stderr
    assert done.returncode == 1, everything
    assert "Traceback" not in everything
    errors = [line for line in everything.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, everything
    for word in words:
        assert word in errors[0]


@pytest.mark.slow
@pytest.mark.parametrize(("breakage", "engine"), [("truncated", "deepspeed"), ("wrong-shape", "fsdp2")])
def test_load_of_a_broken_checkpoint(engine: str, breakage: str, source: Path, tmp_path: Path) -> None:
    folder, word = broken_copy(source, tmp_path, breakage)
    done, seconds = zerostart("load", folder, "--nproc", 2, "--engine", engine)
    failed_with_one_line(done, word)
    assert len((done.stdout + done.stderr).strip().splitlines()) == 1
    assert seconds < LIMIT


@pytest.mark.slow
def test_load_with_a_rank_that_is_killed(source: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(KILL_RANK_1)
    done, seconds = zerostart("load", source, "--nproc", 2, PYTHONPATH=str(tmp_path))
    failed_with_one_line(done, "rank 1")
    assert seconds < LIMIT


@pytest.mark.slow
def test_traceback_where_asked_for(source: Path, tmp_path: Path) -> None:
    folder, _ = broken_copy(source, tmp_path, "enormous-header")
    done, _ = zerostart("--traceback", "plan", folder, "--world-size", 2)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
