"""Every command of README and docs is one that there is, with the options that it has; and runs."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents.blocks import Block, blocks_of, pages
from tests.documents.folders import make_folders
from tests.documents.sessions import CHANGED, SESSIONS, Session, session_of
from tests.processes import finished
from tests.tiny import TinyCheckpoints

SECONDS = 420
SHELL = [block for page in pages() for block in blocks_of(page) if block.language == "sh"]


def test_every_command_has_a_session() -> None:
    """A page may need nothing but its entry in ``sessions.py``, with the models that it names."""
    lost = [b.place for b in SHELL if b.not_run is None and session_of(b.page) is None]
    assert lost == [], "add a session to tests/documents/sessions.py, or a reason: <!-- not run: ... -->"
    used = {block.page for block in SHELL}
    assert [one.page for one in SESSIONS if one.page in pages() and one.page not in used] == []


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("session", SESSIONS, ids=lambda session: session.page)
def test_commands_run(session: Session, checkpoints: TinyCheckpoints, tmp_path: Path) -> None:
    make_folders(tmp_path, session.models, checkpoints)
    for name, text in session.files.items():
        (tmp_path / name).write_text(text)
    blocks = list(blocks_of(session.page))
    for block in blocks:
        if block.file is not None:
            (tmp_path / block.file).write_text(changed(block.text))
    for command in session.first:
        run(command, tmp_path, "before")
    for block in blocks:
        if block.not_run is not None or block.file is not None:
            continue
        if block.language == "python" and session.python:
            (tmp_path / "block.py").write_text("\n" * (block.line - 1) + changed(block.text))
            run("python block.py", tmp_path, block.place)
        elif block.language == "sh":
            for command in lines_of(block):
                run(command, tmp_path, block.place, int(command.startswith(session.fails or ("\0",))))


def changed(text: str) -> str:
    return re.sub("|".join(map(re.escape, CHANGED)), lambda found: CHANGED[found[0]], text)


def lines_of(block: Block) -> Iterator[str]:
    for line in changed(block.text).replace("\\\n", " ").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            yield line


def run(command: str, folder: Path, place: str, code: int = 0) -> None:
    """Run one line by a shell in ``folder``, with the commands of this environment."""
    told = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    told["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), told["PATH"]])
    told |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    name = f"{place}: {command}"
    print(name)
    finished(["bash", "-ec", command], folder, told, seconds=SECONDS, name=name, code=code)
