"""Run every command of README and docs in a shell."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents.blocks import REPOSITORY, Block, blocks_of, pages
from tests.documents.folders import make_folders
from tests.documents.sessions import SESSIONS, SUBSTITUTIONS, Session, session_of
from tests.processes import run_command
from tests.tiny import TinyCheckpoints

SECONDS = 420
SHELL = [block for page in pages() for block in blocks_of(page) if block.language == "sh"]


def test_every_command_has_a_session() -> None:
    missing = [b.place for b in SHELL if b.not_run is None and session_of(b.page) is None]
    assert missing == [], "add a session to tests/documents/sessions.py, or a reason: <!-- not run: ... -->"
    used = {block.page for block in SHELL}
    assert [s.page for s in SESSIONS if s.page in pages() and s.page not in used] == []


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
            (tmp_path / block.file).write_text(substitute(block.text))
    for command in session.setup:
        run(command, tmp_path, "before")
    for block in blocks:
        if block.not_run is not None or block.file is not None:
            continue
        if block.language == "python" and session.python:
            (tmp_path / "block.py").write_text("\n" * (block.line - 1) + substitute(block.text))
            run("python block.py", tmp_path, block.place)
        elif block.language == "sh":
            for command in commands_of(block):
                run(command, tmp_path, block.place, int(command.startswith(session.failing or ("\0",))))


def substitute(text: str) -> str:
    return re.sub("|".join(map(re.escape, SUBSTITUTIONS)), lambda match: SUBSTITUTIONS[match[0]], text)


def commands_of(block: Block) -> Iterator[str]:
    for line in substitute(block.text).replace("\\\n", " ").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            yield line


def run(command: str, folder: Path, place: str, code: int = 0) -> None:
    """Run one line in a shell in ``folder``, with this environment's commands."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    name = f"{place}: {command}"
    print(name)
    output = run_command(
        ["bash", "-ec", command],
        folder,
        environment,
        paths=[REPOSITORY],  # the tasks of configurations are classes of the tests
        seconds=SECONDS,
        name=name,
        code=code,
    )
    if re.search(r" (-m|--module) zerostart ", command) and not code:
        assert "loaded in shards" in output, f"{name}\n{output[-4000:]}"
