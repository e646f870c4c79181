"""Read the fenced blocks of README and docs."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
#: Translations, named like the English pages.
TRANSLATED = DOCS / "zh"

_FENCE = re.compile(r"^(?P<indent> *)(?P<marks>`{3,})(?P<language>[^`]*)$")
_NOT_RUN = re.compile(r"^\s*<!-- not run: (?P<reason>.+?) -->\s*$")
_OUTPUT = "<!-- output -->"


@dataclass(frozen=True)
class Block:
    """One fenced block; ``line`` counts from 1 to its first line of text."""

    page: str
    line: int
    language: str
    text: str
    not_run: str | None = None
    #: True for the printed output of the block before.
    output: bool = False

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str | None:
        """File name in the block's first line, such as ``# train.yaml``."""
        match = re.match(r"# ([\w.-]+\.(?:yaml|py|json))$", self.text.partition("\n")[0])
        return match[1] if match else None


def pages() -> list[str]:
    """List README and the English pages by their paths in the repository."""
    paths = [REPOSITORY / "README.md", *DOCS.rglob("*.md")]
    return sorted(str(path.relative_to(REPOSITORY)) for path in paths if TRANSLATED not in path.parents)


def blocks_of(page: str) -> Iterator[Block]:
    """Yield the blocks of a page in order."""
    lines = (REPOSITORY / page).read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        number += 1
        if fence is None:
            continue
        first = number
        while lines[number : number + 1] and lines[number].strip() != fence["marks"]:
            number += 1
        assert number < len(lines), f"{page}:{first}: the block is not closed"
        text = "\n".join(line.removeprefix(fence["indent"]) for line in lines[first:number]) + "\n"
        above = _line_above(lines, first - 1)
        match = _NOT_RUN.match(above)
        reason = match["reason"] if match else None
        yield Block(page, first + 1, fence["language"].strip(), text, reason, above.strip() == _OUTPUT)
        number += 1


def _line_above(lines: list[str], fence: int) -> str:
    """Return the text line above a fence, which may be a comment."""
    above = [line for line in lines[max(0, fence - 2) : fence] if line.strip()]
    return above[-1] if above else ""
