"""What the commands say of themselves: help of 80 columns, examples that can be typed, completion."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from typer.core import TyperGroup

from tests.cli.running import running
from zerostart.cli import application

GROUP = typer.main.get_command(application())
assert isinstance(GROUP, TyperGroup)
run = running()


@pytest.mark.parametrize("name", ["", *GROUP.commands])
def test_help_fits_a_terminal(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = [name] if name else []
    code, told, _ = run(capsys, *command, "--help")
    assert code == 0
    assert max(map(len, told.splitlines())) <= 80
    assert run(capsys, *command, "-h") == (0, told, "")
    if not name:
        listed = told.partition("Commands:")[2]
        assert "..." not in listed, "a summary is cut"
        return
    words = [shlex.split(line) for line in told.partition("Example")[2].splitlines()[1:]]
    assert words
    for example in words:  # the parser itself says whether it can be typed
        assert example[:2] == ["zerostart", name]
        GROUP.commands[name].make_context(name, example[2:], parent=typer.Context(GROUP)).close()


@pytest.mark.slow
def test_bash_completes_commands_and_options() -> None:
    environment = {**os.environ, "_ZEROSTART_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    for line, expected in (("zerostart sy", {"synth"}), ("zerostart env --ch", {"--check"})):
        own = environment | {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        command = [sys.executable, "-c", "from zerostart.cli import main; main()"]
        done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=60)
        assert set(done.stdout.split()) == expected, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("script", [False, True], ids=["command", "script"])
def test_a_module_takes_a_command_unless_a_script_has_its_name(script: bool, tmp_path: Path) -> None:
    if script:
        (tmp_path / "synth").write_text("print('a script of mine')")
    command = [sys.executable, "-m", "zerostart", "synth"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    if script:
        assert (done.returncode, done.stdout) == (0, "a script of mine\n"), done.stderr
    else:
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("Usage: zerostart synth ")
