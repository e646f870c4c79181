"""The command as a whole: help, version, exit codes, and one clear line for an error."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import zerostart.cli
from tests.cli.running import running
from tests.tiny import TinyCheckpoints
from zerostart.errors import CoverageError

run = running()


def test_help_lists_the_commands_and_imports_no_torch():
    check = (
        "import sys; from zerostart.cli import main\n"
        "try: main(['--help'])\n"
        "finally: print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert lines[-1] == "[]"
    listed = [line.split()[0] for line in lines if line.startswith("  ") and not line.startswith("   ")]
    commands = ["inspect", "plan", "load", "train", "cache", "config", "run", "export", "convert", "synth"]
    commands += ["verify", "diff", "env"]
    assert listed[-len(commands) :] == commands


def test_version(capsys):
    code, out, _ = run(capsys, "--version")
    assert (code, out.split()[0]) == (0, "zerostart")


@pytest.mark.parametrize(
    "argv", [["nonsense"], ["--nonsense"], ["train"], ["train", "a.yaml", "--nproc", "0"]]
)
def test_usage_errors_exit_2(capsys, argv):
    code, _, err = run(capsys, *argv)
    assert code == 2
    assert "Usage" in err


def failing_command() -> None:
    """A command that fails on purpose."""
    raise CoverageError("a.weight is missing\n  from the checkpoint")


def interrupted_command() -> None:
    """A command that is interrupted."""
    raise KeyboardInterrupt


@pytest.fixture
def commands(monkeypatch):
    monkeypatch.delenv("ZEROSTART_TRACEBACK", raising=False)
    module = type("module", (), {})
    monkeypatch.setattr(zerostart.cli.importlib, "import_module", lambda name: module)

    def use(function):
        for name in ("command", "inspect", "verify", "diff", "convert", "export"):
            setattr(module, name, staticmethod(function))

    return use


def test_an_error_is_one_line_and_exit_code_1(capsys, commands):
    commands(failing_command)
    assert run(capsys, "load") == (1, "", "error: a.weight is missing\\n from the checkpoint\n")


def test_traceback_when_asked_for(capsys, commands, monkeypatch):
    commands(failing_command)
    monkeypatch.setenv("ZEROSTART_TRACEBACK", "")  # restored after the test, whatever main sets
    code, _, err = run(capsys, "--traceback", "load")
    assert code == 1
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("error: ")


def test_an_interrupt_is_exit_code_130(capsys, commands):
    commands(interrupted_command)
    code, _, err = run(capsys, "load")
    assert (code, err) == (130, "interrupted\n")


# What a plan imports: the engine that it is for, and of libraries what the model needs.


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


@pytest.mark.slow
@pytest.mark.slow
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


@pytest.mark.slow
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
