"""What a plan imports: the engine that it is for, and of libraries what the model needs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.tiny import TinyCheckpoints

OTHER = {"deepspeed": "fsdp2", "fsdp2": "deepspeed"}


def _imported(program: str) -> list[str]:
    """The modules that ``program`` leaves imported."""
    done = "; import json, sys; print(json.dumps(sorted(sys.modules)))"
    made = subprocess.run(
        [sys.executable, "-c", program + done], capture_output=True, text=True, timeout=120, check=True
    )
    found: list[str] = json.loads(made.stdout.splitlines()[-1])
    return found


def _of_engine(engine: str, modules: list[str]) -> list[str]:
    """Our own modules for ``engine`` among ``modules``."""
    return [name for name in modules if name.startswith(f"zerostart.engines.{engine}.")]


@pytest.mark.parametrize("engine", OTHER)
def test_the_command_imports_no_other_engine(engine: str, checkpoints: TinyCheckpoints) -> None:
    arguments = ["plan", str(checkpoints("qwen3")), "--world-size", "4", "--engine", engine, "--json"]
    modules = _imported(
        f"from zerostart.cli import main\ntry: main({arguments!r})\nexcept SystemExit: pass\npass"
    )
    assert "transformers.models.qwen3.modeling_qwen3" in modules
    assert "transformers.models.qwen2.modeling_qwen2" not in modules
    assert "deepspeed" not in modules  # its layouts and its memory are our own arithmetic
    assert _of_engine(engine, modules)
    assert not _of_engine(OTHER[engine], modules)


@pytest.mark.parametrize("engine", OTHER)
def test_a_plain_module_needs_no_library(engine: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(4, 4), "bias": torch.zeros(4)}, path)
    modules = _imported(
        "import torch, zerostart; "
        f"zerostart.plan({str(path)!r}, 2, {engine!r}, model=torch.nn.Linear(4, 4, device='meta'))"
    )
    assert not {"transformers", "diffusers", "accelerate", "deepspeed"} & set(modules)
    # What torch has of FSDP tells nothing: its dispatcher imports that, with torch._dynamo, whoever uses it.
    assert not _of_engine(OTHER[engine], modules)
