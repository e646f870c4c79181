"""Run ``benchmarks/gpu_check.py`` on the pretend accelerator."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_check import checks, differing_losses
from tests.npu_ranks import npu_environment

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"
#: Checks that are too large for this test, or need another accelerator.
GPU_ONLY = ("large", "compiled", "DeepSpeed's", "fused")


def run(folder: Path, *words: str) -> tuple[int, list[dict[str, Any]]]:
    """Return the exit code and the written lines."""
    out = folder / "out.jsonl"
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(out), "--scratch", str(folder), *words],
        env={**npu_environment(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert result.returncode in (0, 1), result.stderr
    facts, *lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert facts["facts"]["accelerator"] == "npu"
    return result.returncode, lines


def test_nan_and_infinity_are_differences() -> None:
    nan = float("nan")
    assert differing_losses([1.0, 2.0], [1.0, 2.0 + 1e-5]) == []
    for actual, expected in ((nan, 1.0), (1.0, nan), (nan, nan), (float("inf"), 1.0), (1.1, 1.0)):
        assert len(differing_losses([actual], [expected])) == 1


@pytest.mark.slow
def test_tiny_checks_write_their_lines(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "--tiny", "--ranks", "1,2")
    assert [line["check"] for line in lines] == ["fsdp2 3", "deepspeed 3", "rates", "races"] * 2
    assert not [line for line in lines if line.get("error") or line.get("wrong")]
    assert code == 0


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_the_other_checks_write_their_lines(part: int, tmp_path: Path) -> None:
    names = [check.name for check in checks() if not check.tiny and not check.name.startswith(GPU_ONLY)]
    selected = names[part::6]
    code, lines = run(tmp_path, "--ranks", "1", "--only", ";".join(selected))
    assert [line["check"] for line in lines] == selected
    assert not [line for line in lines if line.get("error") or line.get("wrong") or line.get("left_out")]
    assert code == 0
