"""Every command of README and docs is one that there is, with the options that it has; and runs."""

import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import typer.main
from pydantic import BaseModel
from typer.core import TyperGroup, TyperOption

from tests.documents.blocks import REPOSITORY, Block, blocks_of, pages
from tests.documents.folders import make_folders
from tests.documents.sessions import CHANGED, SESSIONS, Session, session_of
from tests.processes import finished
from tests.tiny import TinyCheckpoints
from zerostart.cli import application
from zerostart.training.config.configuration import TrainConfig

SECONDS = 420
COMMANDS = typer.main.get_command(application())
SHELL = [block for page in pages() for block in blocks_of(page) if block.language == "sh"]
_QUOTED = re.compile(r"(?<!`)`(zerostart [a-z]+(?:\s[^`]*)?)`")


def test_every_command_has_a_session() -> None:
    """A page may need nothing but its entry in ``sessions.py``, with the models that it names."""
    lost = [b.place for b in SHELL if b.not_run is None and session_of(b.page) is None]
    assert lost == [], "add a session to tests/documents/sessions.py, or a reason: <!-- not run: ... -->"
    used = {block.page for block in SHELL}
    assert [one.page for one in SESSIONS if one.page in pages() and one.page not in used] == []


def test_options_are_there() -> None:
    """In blocks and in running text, whether they are run or not."""
    quoted = [
        (page, command)
        for page in pages()
        for command in _QUOTED.findall((REPOSITORY / page).read_text(encoding="utf-8"))
    ]
    blocks = [(block.place, command) for block in SHELL for command in commands_in(block.text)]
    found = [f"{place}: {command}: {told}" for place, command in blocks + quoted if (told := wrong(command))]
    assert found == []


def commands_in(text: str) -> Iterator[str]:
    """The simple commands of a block, without comments, in words that are quoted again."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        command: list[str] = []
        for word in [*words, ";"]:
            if word in (";", "&&", "||", "|", "&"):
                if command:
                    yield shlex.join(command)
                command = []
            else:
                command.append(word)


def wrong(command: str) -> str:
    """What a command of zerostart, of make or of the file system is not, or ''."""
    words = command.split()
    if words[0] == "make" and len(words) > 1 and "=" not in words[1]:
        targets = re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
        return "" if words[1] in targets else "no target of the Makefile"
    if words[0] == "python" and len(words) > 1 and words[1].startswith(("benchmarks/", "examples/")):
        return "" if (REPOSITORY / words[1]).exists() else "no such script"
    if "zerostart" not in words:
        return ""
    rest = words[words.index("zerostart") + 1 :]
    if words[max(0, words.index("zerostart") - 1)] == "-m" and rest[:1] and rest[0] not in COMMANDS.commands:
        rest = ["run", *rest]  # python -m zerostart
    return options_of(rest) if rest and not rest[0].startswith("-") else ""


def options_of(words: list[str]) -> str:
    """Options, or keys of a configuration, that a command of zerostart does not have."""
    assert isinstance(COMMANDS, TyperGroup)
    command = COMMANDS.commands.get(words[0].strip("[]"))
    if command is None:
        return "no command" if re.fullmatch("[a-z]+", words[0]) else ""
    known = {opt: p for p in command.params for opt in (*p.opts, *p.secondary_opts)}
    unknown, left = [], [word.strip("[]") for word in words[1:]]
    while left:
        word = left.pop(0)
        if re.match(r"--?[a-z]", word):
            name, given, _ = word.partition("=")
            parameter = known.get(name)
            if parameter is None and name != "--help":
                unknown.append(name)
            elif isinstance(parameter, TyperOption) and not parameter.is_flag and not given:
                left = left[1:]
        elif command.name == "run":
            break  # What follows the script is its own.
        elif re.match(r"[a-z_]+\.[a-z_.]+=", word) and not has_key(word.partition("=")[0]):
            unknown.append(word)
    return f"{words[0]} has no {', '.join(unknown)}" if unknown else ""


def has_key(key: str) -> bool:
    """Whether there is such a key in a configuration; those of a task are its own."""
    section, _, name = key.partition(".")
    found = TrainConfig.model_fields.get(section)
    kinds = [] if found is None else [found.annotation, *get_args(found.annotation)]
    inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return section == "task" or any(name.partition(".")[0] in kind.model_fields for kind in inner)


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
