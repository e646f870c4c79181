"""The JSON that the command line gives, to the letter."""

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
    done = subprocess.run(
        [ZEROSTART, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "it/s" not in done.stderr, "a bar of another library, where no terminal is"
    return done.stdout


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_plan_json(engine: str, checkpoints: TinyCheckpoints, capsys: pytest.CaptureFixture[str]) -> None:
    path = checkpoints("qwen3_moe", torch.bfloat16, sharded=True)
    capsys.readouterr()
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["plan", str(path), "--world-size", "3", "--engine", engine, "--json"])
    made = json.loads(capsys.readouterr().out)
    assert made.keys() >= {
        "ranks",
        "checkpoint_bytes",
        "parameters",
        "largest_tensor_bytes",
        "planning_seconds",
    }
    keys = {"rank", "read_bytes", "read_ops", "device_bytes", "peak_host_bytes"}
    assert all(rank.keys() >= keys for rank in made["ranks"])
    assert all(rank["peaks"].keys() == {"load", "initialize", "step"} for rank in made["ranks"])
    assert all(rank["peaks"]["load"]["host"] == rank["peak_host_bytes"] for rank in made["ranks"])
    assert [rank["rank"] for rank in made["ranks"]] == [0, 1, 2]
    elements, stored = sizes(path)
    assert made["parameters"] == elements
    assert made["checkpoint_bytes"] == stored
    assert stored <= sum(rank["read_bytes"] for rank in made["ranks"]) <= 1.01 * stored
    assert made["largest_tensor_bytes"] == 97 * 22 * 2
    assert all(rank["peak_host_bytes"] >= rank["device_bytes"] for rank in made["ranks"])
    assert 0 < made["planning_seconds"] < 60


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_load_json(engine: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    zerostart("load", minilm_path(), "--nproc", 2, "--engine", engine, "--verify", "--json", file)
    made: dict[str, Any] = json.loads(file.read_text())
    assert made.keys() == {
        "ranks",
        "missing",
        "unexpected",
        "mismatched",
        "verified",
        "seconds",
        "forecast",
    }
    keys = {"rank", "seconds", "read_bytes", "peak_host_bytes", "peak_device_bytes"}
    assert [rank.keys() for rank in made["ranks"]] == [keys] * 2
    told = made["forecast"]
    assert [rank["read_bytes"] for rank in told] == [rank["read_bytes"] for rank in made["ranks"]]
    assert all(rank["peak_host_bytes"] > 0 for rank in told)
    for number, rank in enumerate(made["ranks"]):
        assert rank["rank"] == number
        assert rank["seconds"].keys() == {"plan", "build", "read", "total"}
    assert made["verified"] is True
    assert made["missing"] == made["unexpected"] == made["mismatched"] == []
    assert made["seconds"] >= max(rank["seconds"]["read"] for rank in made["ranks"])
    _, stored = sizes(minilm_path())
    assert stored * 0.99 <= sum(rank["read_bytes"] for rank in made["ranks"]) <= stored * 1.01


def sizes(path: Path) -> tuple[int, int]:
    """Elements and bytes of all tensors of a checkpoint."""
    from safetensors.torch import load_file

    tensors = [t for file in path.glob("*.safetensors") for t in load_file(file).values()]
    return sum(t.numel() for t in tensors), sum(t.nbytes for t in tensors)
