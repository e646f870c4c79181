"""``zerostart env``, run as a user runs it."""

import importlib.metadata
import json
import platform
from typing import Any

import pytest
import torch

from tests.cli.running import running

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
