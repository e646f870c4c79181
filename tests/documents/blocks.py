"""The fenced blocks of README and docs, and which of them are not run, and why."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
#: Pages in another language, each beside the page of the same name in English.
TRANSLATED = DOCS / "zh"

_FENCE = re.compile(r"^(?P<indent> *)(?P<marks>`{3,})(?P<language>[^`]*)$")
_NOT_RUN = re.compile(r"^\s*<!-- not run: (?P<reason>.+?) -->\s*$")
_OUTPUT = "<!-- output -->"


@dataclass(frozen=True)
class Block:
    """One fenced block: ``line`` is that of its first line of text, counted from 1."""

    page: str
    line: int
    language: str
    text: str
    not_run: str | None = None
    #: Whether it is what the commands of the block before it print.
    output: bool = False

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str | None:
        """The name of the file that the block is, where its first line says it: ``# train.yaml``."""
        found = re.match(r"# ([\w.-]+\.(?:yaml|py|json))$", self.text.partition("\n")[0])
        return found[1] if found else None


def pages() -> list[str]:
    """README and every page in English, by its path in the repository."""
    found = [REPOSITORY / "README.md", *DOCS.rglob("*.md")]
    return sorted(str(page.relative_to(REPOSITORY)) for page in found if TRANSLATED not in page.parents)


def blocks_of(page: str) -> Iterator[Block]:
    """The blocks of a page, in their order. Raises AssertionError for a fence that is never closed."""
    lines = (REPOSITORY / page).read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        opened = _FENCE.match(lines[number])
        number += 1
        if opened is None:
            continue
        first = number
        while lines[number : number + 1] and lines[number].strip() != opened["marks"]:
            number += 1
        assert number < len(lines), f"{page}:{first}: the block is not closed"
        text = "\n".join(line.removeprefix(opened["indent"]) for line in lines[first:number]) + "\n"
        above = _above(lines, first - 1)
        found = _NOT_RUN.match(above)
        reason = found["reason"] if found else None
        yield Block(page, first + 1, opened["language"].strip(), text, reason, above.strip() == _OUTPUT)
        number += 1


def _above(lines: list[str], fence: int) -> str:
    """What stands above a fence, in a comment that the reader does not see."""
    above = [line for line in lines[max(0, fence - 2) : fence] if line.strip()]
    return above[-1] if above else ""
