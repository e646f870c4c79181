"""``benchmarks/gpu_check.py``, tried out on the pretend accelerator."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from npu_ranks import npu_environment

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


@pytest.mark.slow
def test_each_check_writes_its_line(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    words = ["--tiny", "--ranks", "1,2", "--out", str(out), "--scratch", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        env={**npu_environment(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=290,
    )
    facts, *lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert facts["facts"]["accelerator"] == "npu"
    assert [line["check"] for line in lines] == ["fsdp2 3", "deepspeed 3", "rates", "races"] * 2
    assert not [line for line in lines if line.get("error") or line.get("wrong")], done.stderr[-2000:]
    assert done.returncode == 0
