"""Commands that start in a stranger's directory run none of the modules that lie there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import TinyCheckpoints

HOSTILE = ("tempfile", "typing", "socket", "torch", "json")


@pytest.mark.parametrize(
    "command",
    [
        ["load", ".", "--nproc", "2", "--engine", "fsdp2"],
        ["plan", ".", "--world-size", "2"],
        ["inspect", "."],
        ["diff", ".", "."],
        ["env"],
    ],
    ids=lambda command: command[0],
)
def test_no_module_of_the_working_directory_runs(
    command: list[str], checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    folder, ran = tmp_path / "strange", tmp_path / "ran"
    folder.mkdir()
    for file in checkpoints("qwen3").iterdir():
        (folder / file.name).symlink_to(file)
    for name in HOSTILE:
        (folder / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write({name!r})\nraise SystemExit(7)\n")
    zerostart = Path(sys.executable).with_name("zerostart")
    done = subprocess.run(
        [zerostart, *command], cwd=folder, env=dict(os.environ), capture_output=True, text=True, timeout=300
    )
    assert not ran.exists(), ran.read_text()
    assert done.returncode == 0, done.stderr
