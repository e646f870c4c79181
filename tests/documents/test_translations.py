"""Translated pages show the same commands, code and configurations as the English ones, and nothing else."""

import os
import re
from pathlib import PurePosixPath

import pytest

from tests.documents.blocks import REPOSITORY, Block, blocks_of, translations

#: What a page has for its readers in English alone: where it stands among the others.
DIRECTIVE = "{toctree}"
#: Pages that there have to be.
WANTED = {
    "docs/index.md",
    "docs/quickstart.md",
    *(f"docs/tutorials/{name}.md" for name in ("language-model", "experts", "diffusion", "existing-script")),
}
_COMMENT = re.compile(r"(^|\s+)#(?! [\w.-]+\.(?:yaml|py|json)$).*$", re.MULTILINE)
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_QUOTED = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+(?= )", re.MULTILINE)
_COMMAND = re.compile(r"(?<!`)`((?:zerostart|make|accelerate|torchrun) [^`]+)`")


def shown(page: str) -> list[tuple[str, str, bool]]:
    """The blocks of a page: language, text without comments, and whether it is run."""
    return [
        (block.language, without_comments(block), block.not_run is not None)
        for block in blocks_of(page)
        if block.language != DIRECTIVE
    ]


def without_comments(block: Block) -> str:
    text = _COMMENT.sub("", block.text) if block.language in ("sh", "yaml", "python") else block.text
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


def test_pages_that_there_have_to_be() -> None:
    assert {original for _, original in translations()} == WANTED


@pytest.mark.parametrize(("page", "original"), translations())
def test_blocks_are_the_same(page: str, original: str) -> None:
    assert shown(page) == shown(original)


@pytest.mark.parametrize(("page", "original"), translations())
def test_commands_in_the_text_are_the_same(page: str, original: str) -> None:
    texts = [(REPOSITORY / name).read_text(encoding="utf-8") for name in (page, original)]
    found, expected = ({" ".join(c.split()) for c in _COMMAND.findall(text)} for text in texts)
    assert found == expected


def told(page: str) -> tuple[set[str], set[str], list[str]]:
    """What the text of a page quotes as code, the pages that it points at, and the levels of its headings."""
    text = _FENCED.sub("", (REPOSITORY / page).read_text(encoding="utf-8"))
    folder = PurePosixPath(page).parent
    links = {os.path.normpath(folder / link).replace("docs/zh/", "docs/") for link in _LINK.findall(text)}
    return {" ".join(code.split()) for code in _QUOTED.findall(text)}, links, _HEADING.findall(text)


@pytest.mark.parametrize(("page", "original"), translations())
def test_the_text_names_the_same_things(page: str, original: str) -> None:
    """Keys, options, files and pages that one of them says more of than the other."""
    found, expected = told(page), told(original)
    if page.endswith("index.md"):  # each points at the other
        found, expected = (({*codes}, set(), levels) for codes, _, levels in (found, expected))
    assert found == expected


def test_both_sidebars_list_the_same_pages() -> None:
    """A page that is added to one of them alone is not found by half of the readers."""
    entry = re.compile(r"^(?!:)(?:.*<(.+)>|(\S+))$", re.MULTILINE)
    found, expected = (
        [
            os.path.normpath(PurePosixPath(page).parent / (named or plain)).replace("docs/zh/", "docs/")
            for block in blocks_of(page)
            if block.language == DIRECTIVE
            for named, plain in entry.findall(block.text)
        ]
        for page in ("docs/zh/index.md", "docs/index.md")
    )
    assert found == expected
    assert "docs/stores" in expected
