"""Test ``zerostart env``."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.running import make_runner

LIBRARIES = ("torch", "transformers", "deepspeed", "accelerate", "diffusers")


run = make_runner("env")


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, _ = run(capsys, "--json", *arguments)
    assert code == 0
    document: dict[str, Any] = json.loads(out)
    return document


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    document = run_json(capsys)
    assert list(document) == ["installed", "supported", "uses", "devices", "python", "platform"]
    for name in (*LIBRARIES, "zerostart", "peft"):
        assert document["installed"][name] == importlib.metadata.version(name)
    assert document["installed"]["trl"] is None or isinstance(document["installed"]["trl"], str)
    assert document["supported"]["torch"] == {"range": ">=2.11,<2.16", "known": True, "extra": None}
    assert document["supported"]["deepspeed"]["extra"] == "deepspeed"
    assert document["python"] == platform.python_version()
    assert set(document["devices"]) == {"cores", "available_memory_bytes", "accelerators", "usable"}
    assert document["devices"]["usable"] is None
    assert document["uses"] == []


def test_check_compares_the_libraries(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    document = run_json(capsys, "--check")
    assert len(document["uses"]) > 50
    assert {use["misfit"] for use in document["uses"]} == {""}
    accelerators = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    assert document["devices"]["usable"] == accelerators
    assert run(capsys, "--check")[1].startswith("zerostart works here: all ")
    monkeypatch.setattr(torch.nn.init, "_no_grad_trunc_normal_", lambda tensor: tensor)
    code, out, _ = run(capsys, "--check")
    assert code == 1
    assert out.startswith(f"zerostart does not fit torch {importlib.metadata.version('torch')}: 1 of ")
    text = " ".join(out.split())
    assert "torch.nn.init._no_grad_trunc_normal_ has changed" in text
    assert "it takes (tensor), not (tensor, mean, std, a, b, ...)" in text


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_prepare_compiles_the_operation_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zerostart", "env", "--prepare"]
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for _ in range(2)
    ]
    assert [process.communicate()[0].count(b"deepspeed") > 0 for process in processes] == [True, True]
    assert [process.returncode for process in processes] == [0, 0]
    (compiled,) = tmp_path.rglob("deepspeed_shm_comm.so")
    modified = compiled.stat().st_mtime_ns
    assert subprocess.run(command, env=environment, stdout=subprocess.DEVNULL).returncode == 0
    assert compiled.stat().st_mtime_ns == modified
