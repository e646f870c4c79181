"""What a page shows as the output of a command is what the command prints.

Marked by ``<!-- output -->``: a ``text`` block with what the last command of the ``sh`` block before prints.
``python -m tests.documents.test_documented_output`` writes the pages anew.
"""

import contextlib
import io
import os
import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.documents.blocks import REPOSITORY, Block, blocks_of, pages
from tests.documents.folders import make_folders
from tests.tiny import TinyCheckpoints
from zerostart.cli import main

#: By page the folders that its commands name (``folders.py``).
MODELS: Mapping[str, Mapping[str, str]] = {
    "docs/forecast.md": {"Qwen/Qwen3-30B-A3B": "sparse:qwen3_30b_a3b"},
}
#: What is another at every run (seconds) and on every file system (buffers for reading): both are masked.
CHANGING = (
    re.compile(r"(?<=planned in )[\d.]+ \w+"),
    re.compile(r"\d+\.\d MB|(?<=GB, )[\d,]+(?= times that)"),
)


def outputs() -> Iterator[tuple[str, Block, Block]]:
    """A page, the commands on it, and their output."""
    for page in pages():
        found = list(blocks_of(page))
        for commands, output in zip([None, *found], found, strict=False):
            if output.output:
                assert commands is not None
                assert commands.language == "sh", f"{output.place}: no commands stand before the output"
                yield page, commands, output


def printed(page: str, commands: Block, folder: Path, checkpoints: TinyCheckpoints) -> str:
    """What the last command of a block prints, in a folder with what the page takes as given."""
    make_folders(folder, MODELS[page], checkpoints)
    *_, last = commands.text.replace("\\\n", " ").strip().splitlines()
    program, *words = shlex.split(last, comments=True)
    assert program == "zerostart"
    out = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0, out.getvalue()
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def masked(text: str) -> str:
    for changing in CHANGING:
        text = changing.sub("#", text)
    return text


@pytest.mark.parametrize(
    ("page", "commands", "output"), [pytest.param(*one, id=one[2].place) for one in outputs()]
)
def test_output_is_what_the_command_prints(
    page: str,
    commands: Block,
    output: Block,
    checkpoints: TinyCheckpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    got = printed(page, commands, tmp_path, checkpoints)
    assert masked(output.text) == masked(got), f"python -m {__spec__.name} writes the page anew"


def test_there_are_some() -> None:
    assert {page for page, _, _ in outputs()} == set(MODELS)


if __name__ == "__main__":
    os.environ["COLUMNS"] = "80"
    for page, commands, output in outputs():
        with tempfile.TemporaryDirectory() as folder:
            got = printed(page, commands, Path(folder), TinyCheckpoints(Path(folder, "tiny")))
        path = REPOSITORY / page
        path.write_text(path.read_text("utf-8").replace(output.text, got), encoding="utf-8")
