"""Test the command's help, version, exit codes, error lines and imports."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import zerostart.cli
from tests.cli.running import make_runner
from tests.tiny import TinyCheckpoints
from zerostart.errors import CoverageError

run = make_runner()


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
    command_names = [
        line.split()[0] for line in lines if line.startswith("  ") and not line.startswith("   ")
    ]
    commands = ["inspect", "plan", "load", "train", "cache", "config", "run", "export", "convert", "synth"]
    commands += ["verify", "diff", "env"]
    assert command_names[-len(commands) :] == commands


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
    """Fail."""
    raise CoverageError("a.weight is missing\n  from the checkpoint")


def interrupted_command() -> None:
    """Raise KeyboardInterrupt."""
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


def test_traceback_option(capsys, commands, monkeypatch):
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


# A plan imports only its engine, and the libraries that the model needs.


OTHER_ENGINE = {"deepspeed": "fsdp2", "fsdp2": "deepspeed"}


def _imported_modules(program: str) -> list[str]:
    """Return the modules that ``program`` has imported."""
    print_modules = "; import json, sys; print(json.dumps(sorted(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", program + print_modules],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    modules: list[str] = json.loads(result.stdout.splitlines()[-1])
    return modules


def _engine_modules(engine: str, modules: list[str]) -> list[str]:
    """Select zerostart's modules for ``engine``."""
    return [name for name in modules if name.startswith(f"zerostart.engines.{engine}.")]


@pytest.mark.slow
@pytest.mark.parametrize("engine", OTHER_ENGINE)
def test_a_plan_imports_no_other_engine(engine: str, checkpoints: TinyCheckpoints) -> None:
    arguments = ["plan", str(checkpoints("qwen3")), "--world-size", "4", "--engine", engine, "--json"]
    modules = _imported_modules(
        f"from zerostart.cli import main\ntry: main({arguments!r})\nexcept SystemExit: pass\npass"
    )
    assert "transformers.models.qwen3.modeling_qwen3" in modules
    assert "transformers.models.qwen2.modeling_qwen2" not in modules
    assert "deepspeed" not in modules  # zerostart computes its layouts and memory itself
    assert _engine_modules(engine, modules)
    assert not _engine_modules(OTHER_ENGINE[engine], modules)


@pytest.mark.slow
@pytest.mark.parametrize("engine", OTHER_ENGINE)
def test_a_plain_module_imports_no_model_library(engine: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(4, 4), "bias": torch.zeros(4)}, path)
    modules = _imported_modules(
        "import torch, zerostart; "
        f"zerostart.plan({str(path)!r}, 2, {engine!r}, model=torch.nn.Linear(4, 4, device='meta'))"
    )
    assert not {"transformers", "diffusers", "accelerate", "deepspeed"} & set(modules)
    # torch's own FSDP is no evidence: torch's dispatcher imports it with torch._dynamo.
    assert not _engine_modules(OTHER_ENGINE[engine], modules)
