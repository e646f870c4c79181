"""Commands import no module of the working directory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import TinyCheckpoints

MODULES = ("tempfile", "typing", "socket", "torch", "json")


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
    folder, marker = tmp_path / "strange", tmp_path / "ran"
    folder.mkdir()
    for file in checkpoints("qwen3").iterdir():
        (folder / file.name).symlink_to(file)
    for name in MODULES:
        (folder / f"{name}.py").write_text(
            f"open({str(marker)!r}, 'a').write({name!r})\nraise SystemExit(7)\n"
        )
    zerostart = Path(sys.executable).with_name("zerostart")
    result = subprocess.run(
        [zerostart, *command], cwd=folder, env=dict(os.environ), capture_output=True, text=True, timeout=300
    )
    assert not marker.exists(), marker.read_text()
    assert result.returncode == 0, result.stderr
