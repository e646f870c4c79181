"""``zerostart env``, run as a user runs it."""

import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.running import running
from zerostart.cli import env

HEAVY = ("torch", "transformers", "deepspeed", "accelerate", "diffusers")


run = running("env")


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, _ = run(capsys, "--json", *arguments)
    assert code == 0
    found: dict[str, Any] = json.loads(out)
    return found


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys)
    assert list(found) == ["installed", "supported", "uses", "devices", "python", "platform"]
    for name in (*HEAVY, "zerostart", "peft"):
        assert found["installed"][name] == importlib.metadata.version(name)
    assert found["installed"]["trl"] is None or isinstance(found["installed"]["trl"], str)
    assert found["supported"]["torch"] == {"range": ">=2.11,<2.16", "known": True, "extra": None}
    assert found["supported"]["deepspeed"]["extra"] == "deepspeed"
    assert found["python"] == platform.python_version()
    assert set(found["devices"]) == {"cores", "available_memory_bytes", "accelerators", "usable"}
    assert found["devices"]["usable"] is None
    assert found["uses"] == []


def test_what_is_absent_or_unknown_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "diffusers":
            raise importlib.metadata.PackageNotFoundError(name)
        return "9.9.0" if name == "transformers" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(capsys)
    assert code == 0
    text = " ".join(out.split())
    assert "diffusers - >=0.42,<0.43 pip install 'zerostart[diffusers]'" in text
    assert "transformers 9.9.0 >=5.17,<5.24 not a version that zerostart knows" in text
    found = document(capsys)
    assert found["supported"]["diffusers"]["known"] is None
    assert found["supported"]["transformers"]["known"] is False
    assert found["supported"]["torch"]["known"] is True


def test_check_compares_the_libraries(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = document(capsys, "--check")
    assert len(found["uses"]) > 50
    assert {use["misfit"] for use in found["uses"]} == {""}
    accelerators = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    assert found["devices"]["usable"] == accelerators
    assert run(capsys, "--check")[1].startswith("zerostart works here: all ")
    monkeypatch.setattr(torch.nn.init, "_no_grad_trunc_normal_", lambda tensor: tensor)
    code, out, _ = run(capsys, "--check")
    assert code == 1
    assert out.startswith(f"zerostart does not fit torch {importlib.metadata.version('torch')}: 1 of ")
    text = " ".join(out.split())
    assert "torch.nn.init._no_grad_trunc_normal_ has changed" in text
    assert "it takes (tensor), not (tensor, mean, std, a, b, ...)" in text


def test_accelerators_are_those_of_the_driver(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The form of the files is that of NVIDIA's Linux driver (its README, "The /proc interface")."""
    for number, text in enumerate(("Model: \t\t NVIDIA H200\nIRQ:   \t\t 47\n", "IRQ: \t 1\n")):
        folder = tmp_path / f"0000:0{number}:00.0"
        folder.mkdir()
        (folder / "information").write_text(text)
    monkeypatch.setattr(env, "_GPUS", tmp_path)
    assert document(capsys)["devices"]["accelerators"] == ["NVIDIA H200", "unknown"]
    assert "NVIDIA H200, unknown" in run(capsys)[1]
