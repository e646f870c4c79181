"""Failing commands print one line and exit 1."""

import os
import subprocess
import sysconfig
import time
from pathlib import Path

import pytest

from tests.failure.breakages import break_copy
from tests.tiny import TinyCheckpoints

MAX_SECONDS = 30.0
ZEROSTART = Path(sysconfig.get_path("scripts")) / "zerostart"

#: A sitecustomize module that kills rank 1 at its first read of weights.
KILL_RANK_1 = """
import os, signal
if os.environ.get("RANK") == "1":
    os.preadv = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def source(checkpoints: TinyCheckpoints) -> Path:
    return checkpoints("qwen3_moe", sharded=True)


def run_zerostart(*arguments: object, **environment: str) -> tuple[subprocess.CompletedProcess[str], float]:
    started = time.monotonic()
    process = subprocess.run(
        [ZEROSTART, *map(str, arguments)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return process, time.monotonic() - started


def check_one_error_line(process: subprocess.CompletedProcess[str], *words: str) -> None:
    output = process.stdout + process.stderr
    assert process.returncode == 1, output
    assert "Traceback" not in output
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, output
    for word in words:
        assert word in errors[0]


@pytest.mark.slow
@pytest.mark.parametrize(("breakage", "engine"), [("truncated", "deepspeed"), ("wrong-shape", "fsdp2")])
def test_broken_checkpoint_prints_one_line(engine: str, breakage: str, source: Path, tmp_path: Path) -> None:
    folder, word = break_copy(source, tmp_path, breakage)
    process, seconds = run_zerostart("load", folder, "--nproc", 2, "--engine", engine)
    check_one_error_line(process, word)
    assert len((process.stdout + process.stderr).strip().splitlines()) == 1
    assert seconds < MAX_SECONDS


@pytest.mark.slow
def test_load_with_a_killed_rank_prints_one_line(source: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(KILL_RANK_1)
    process, seconds = run_zerostart("load", source, "--nproc", 2, PYTHONPATH=str(tmp_path))
    check_one_error_line(process, "rank 1")
    assert seconds < MAX_SECONDS


@pytest.mark.slow
def test_traceback_option(source: Path, tmp_path: Path) -> None:
    folder, _ = break_copy(source, tmp_path, "enormous-header")
    process, _ = run_zerostart("--traceback", "plan", folder, "--world-size", 2)
    assert process.returncode == 1
    assert "Traceback" in process.stderr
