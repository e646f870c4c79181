"""Limit the words from the top of README to a newcomer's first command."""

import re

import pytest

from tests.documents.blocks import DOCS, REPOSITORY, TRANSLATED, blocks_of

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
MAX_WORDS = 200
START_PAGES = (
    "index",
    "quickstart",
    *(f"tutorials/{n}" for n in ("existing-script", "diffusion", "experts", "own-module")),
)


def count_words(text: str) -> int:
    text = re.sub(r"<!--.*?-->|^#+ ", "", text, flags=re.S | re.M)
    return len(re.sub(r"\]\([^)]*\)", "]", text).split())


def to_first_command(text: str) -> str:
    return text[: re.search(r"^```sh$", text, re.M).start()]


@pytest.mark.parametrize(
    "page",
    [
        None,
        "docs/tutorials/diffusion.md",
        "docs/tutorials/experts.md",
        "docs/tutorials/own-module.md",
        "docs/why.md",
    ],
)
def test_the_first_command_comes_early(page):
    if page is None:
        assert count_words(to_first_command(README)) <= MAX_WORDS
        return
    until_link = README[: README.index(f"]({page})")]
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    assert count_words(until_link) + count_words(to_first_command(text)) <= MAX_WORDS


@pytest.mark.parametrize("name", START_PAGES)
def test_chinese_pages_have_the_same_code(name):
    def code(folder):
        page = str((folder / f"{name}.md").relative_to(REPOSITORY))
        return [
            re.sub(r"  # .*", "", block.text)
            for block in blocks_of(page)
            if not block.language.startswith("{")
        ]

    assert code(TRANSLATED) == code(DOCS)


def test_readme_has_the_count_of_the_conformance_page():
    page = (DOCS / "generated/conformance.md").read_text(encoding="utf-8")
    covered, families = re.findall(r"(\d+) (?:identifiers|families) are covered, 0 of them wrong", page)
    assert (
        f"{covered} model types and classes of transformers and {families} original diffusers layouts"
        in README
    )
