"""Check the keys and values of the command line's JSON."""

import json
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import TinyCheckpoints, minilm_path
from zerostart.cli import main

ZEROSTART = Path(sysconfig.get_path("scripts")) / "zerostart"


def zerostart(*arguments: object) -> str:
    result = subprocess.run(
        [ZEROSTART, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "it/s" not in result.stderr, "a library's progress bar without a terminal"
    return result.stdout


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_plan_json(engine: str, checkpoints: TinyCheckpoints, capsys: pytest.CaptureFixture[str]) -> None:
    path = checkpoints("qwen3_moe", torch.bfloat16, sharded=True)
    capsys.readouterr()
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["plan", str(path), "--world-size", "3", "--engine", engine, "--json"])
    plan = json.loads(capsys.readouterr().out)
    assert plan.keys() >= {
        "ranks",
        "checkpoint_bytes",
        "parameters",
        "largest_tensor_bytes",
        "planning_seconds",
    }
    keys = {"rank", "read_bytes", "read_ops", "device_bytes", "peak_host_bytes"}
    assert all(rank.keys() >= keys for rank in plan["ranks"])
    assert all(rank["peaks"].keys() == {"load", "initialize", "step"} for rank in plan["ranks"])
    assert all(rank["peaks"]["load"]["host"] == rank["peak_host_bytes"] for rank in plan["ranks"])
    assert [rank["rank"] for rank in plan["ranks"]] == [0, 1, 2]
    elements, stored = sizes(path)
    assert plan["parameters"] == elements
    assert plan["checkpoint_bytes"] == stored
    assert stored <= sum(rank["read_bytes"] for rank in plan["ranks"]) <= 1.01 * stored
    assert plan["largest_tensor_bytes"] == 97 * 22 * 2
    assert all(rank["peak_host_bytes"] >= rank["device_bytes"] for rank in plan["ranks"])
    assert 0 < plan["planning_seconds"] < 60


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_load_json(engine: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    zerostart("load", minilm_path(), "--nproc", 2, "--engine", engine, "--verify", "--json", file)
    report: dict[str, Any] = json.loads(file.read_text())
    assert report.keys() == {
        "ranks",
        "missing",
        "unexpected",
        "mismatched",
        "verified",
        "seconds",
        "forecast",
    }
    keys = {"rank", "seconds", "read_bytes", "peak_host_bytes", "peak_device_bytes"}
    assert [rank.keys() for rank in report["ranks"]] == [keys] * 2
    forecast = report["forecast"]
    assert [rank["read_bytes"] for rank in forecast] == [rank["read_bytes"] for rank in report["ranks"]]
    assert all(rank["peak_host_bytes"] > 0 for rank in forecast)
    for number, rank in enumerate(report["ranks"]):
        assert rank["rank"] == number
        assert rank["seconds"].keys() == {"plan", "compile", "build", "read", "total"}
    assert report["verified"] is True
    assert report["missing"] == report["unexpected"] == report["mismatched"] == []
    assert report["seconds"] >= max(rank["seconds"]["read"] for rank in report["ranks"])
    _, stored = sizes(minilm_path())
    assert stored * 0.99 <= sum(rank["read_bytes"] for rank in report["ranks"]) <= stored * 1.01


def sizes(path: Path) -> tuple[int, int]:
    """Return the number of elements and bytes of a checkpoint."""
    from safetensors.torch import load_file

    tensors = [t for file in path.glob("*.safetensors") for t in load_file(file).values()]
    return sum(t.numel() for t in tensors), sum(t.nbytes for t in tensors)
