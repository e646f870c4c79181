"""The keys that docs/reference/json.md names are those of the command line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.documents.blocks import REPOSITORY
from tests.tiny import TinyCheckpoints
from zerostart.cli import main

PAGE = (REPOSITORY / "docs" / "reference" / "json.md").read_text(encoding="utf-8")


def documented(command: str) -> set[str]:
    """The keys of the table below the heading of a command."""
    (section,) = re.findall(
        rf"^## `zerostart {command} [^\n]*\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL
    )
    cells = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    return {key for cell in cells for key in re.findall(r"`(\w+)`", cell)}


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_keys(checkpoints: TinyCheckpoints, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(checkpoints("qwen3"))
    assert printed(capsys, "inspect", path, "--json").keys() == documented("inspect")
    assert printed(capsys, "plan", path, "--world-size", "2", "--json").keys() == documented("plan")
    assert printed(capsys, "diff", path, path, "--json").keys() == documented("diff")
    assert printed(capsys, "env", "--json").keys() == documented("env")


@pytest.mark.slow
def test_keys_of_a_rehearsal(checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    with pytest.raises(SystemExit):
        main(["load", str(checkpoints("qwen3")), "--nproc", "1", "--json", str(file)])
    assert json.loads(file.read_text()).keys() == documented("load")
