"""``benchmarks/gpu_check.py``, tried out on the pretend accelerator."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_check import checks, far, is_absent
from tests.npu_ranks import npu_environment

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"
#: What is too large for a dry run, or of one kind of accelerator.
REAL = ("large", "compiled", "DeepSpeed's", "fused")


def run(folder: Path, *words: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit code, and the lines that were written."""
    out = folder / "out.jsonl"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(out), "--scratch", str(folder), *words],
        env={**npu_environment(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert done.returncode in (0, 1), done.stderr
    facts, *lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert facts["facts"]["accelerator"] == "npu"
    return done.returncode, lines


def test_every_check_of_the_first_hour_is_there() -> None:
    names = [check.name for check in checks()]
    assert len(set(names)) == len(names)
    for engine in ("fsdp2", "deepspeed"):
        assert {f"{engine} {stage}" for stage in range(4)} <= set(names)
        assert {f"{engine} {kind}" for kind in ("qwen3_moe", "mixtral", "gpt_oss")} <= set(names)
        assert {f"diffusion {engine}", f"large {engine}", f"compiled {engine}"} <= set(names)
        assert f"train from YAML, {engine}" in names
    assert {"rates", "races", "fused", "alignment of gpt_oss, deepspeed 3"} <= set(names)


def test_what_is_no_number_is_far() -> None:
    nan = float("nan")
    assert far([1.0, 2.0], [1.0, 2.0 + 1e-5]) == []
    for found, wanted in ((nan, 1.0), (1.0, nan), (nan, nan), (float("inf"), 1.0), (1.1, 1.0)):
        assert len(far([found], [wanted])) == 1


def test_a_check_is_left_out_for_a_library_that_is_not_there_and_for_nothing_else() -> None:
    assert is_absent(ModuleNotFoundError("No module named 'x.y'", name="x.y"))
    assert not is_absent(ModuleNotFoundError("No module named", name="zerostart.upstream.torch_fsdp2"))
    assert not is_absent(ImportError("cannot import name 'load' from 'zerostart'", name="zerostart"))
    assert not is_absent(ImportError("cannot import name 'DTensor' from 'torch'", name="torch"))


def test_names_that_no_check_has_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would be checked, and nothing would have failed."""
    from benchmarks.gpu_check import main

    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--only", "rates,races", "--list"])
    with pytest.raises(SystemExit, match=r"^2$"):
        main()


@pytest.mark.slow
def test_each_check_writes_its_line(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "--tiny", "--ranks", "1,2")
    assert [line["check"] for line in lines] == ["fsdp2 3", "deepspeed 3", "rates", "races"] * 2
    assert not [line for line in lines if line.get("error") or line.get("wrong")]
    assert code == 0


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_the_other_checks(part: int, tmp_path: Path) -> None:
    names = [check.name for check in checks() if not check.tiny and not check.name.startswith(REAL)]
    chosen = names[part::6]
    code, lines = run(tmp_path, "--ranks", "1", "--only", ";".join(chosen))
    assert [line["check"] for line in lines] == chosen
    assert not [line for line in lines if line.get("error") or line.get("wrong") or line.get("left_out")]
    assert code == 0


@pytest.mark.slow
def test_a_check_that_does_not_end_stops_no_other(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "--ranks", "2", "--only", "fsdp2 3;rates", "--limit", "1")
    assert [line["error"] for line in lines] == ["not done after 1 s"] * 2
    assert code == 1
    code, lines = run(tmp_path, "--ranks", "1", "--only", "rates;races", "--minutes", "0")
    assert ["minutes had passed" in line["left_out"] for line in lines] == [True, True]
