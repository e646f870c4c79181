"""What happens to a page before Sphinx reads it, and to docstrings.

A line ``<!-- generated: NAME -->`` becomes the Markdown that ``generated.py`` makes under that name. Links
whose text is the name of a page have its title instead, and pages that are only named are linked. Links to
files of the repository that have no page here lead to the repository; results of benchmarks have a page.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import generated
from sphinx.application import Sphinx
from sphinx.util import logging

DOCS = Path(__file__).parents[1]
REPOSITORY = DOCS.parent
#: Files of the repository that are pages of the site.
PAGES = {"CHANGELOG.md": "changelog.md"}

_GENERATED = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.MULTILINE)
_FENCE = re.compile(r"^( *)(`{3,}).*?^\1\2`*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<path>[\w./-]+)(?P<anchor>#[\w-]+)?\)")
_NAMED = re.compile(r"(?<!\[)`docs/([\w/-]+\.md)`(?!\])")
_IN_DOCSTRING = re.compile(r"``docs/([\w/-]+)\.md``")
#: Where a line of Chinese ends and the next begins there is no space to be.
_CHINESE_LINES = re.compile(r"(?<=[\u3001-\u9fff\uff01-\uff5e])\n(?=[\u3400-\u9fff])")
_RESULTS = "benchmarks/results/"
_log = logging.getLogger(__name__)


def prepare(_app: Sphinx, page: str, source: list[str]) -> None:
    """Change the text of ``page`` in place, as Sphinx's event ``source-read`` has it."""
    text = _GENERATED.sub(lambda found: generated.markdown(found[1]), source[0])
    text = _CHINESE_LINES.sub("", text)
    source[0] = _outside_of_fences(text, lambda prose: _linked(prose, page))


def _outside_of_fences(text: str, change: Callable[[str], str]) -> str:
    found, at = [], 0
    for fence in _FENCE.finditer(text):
        found += [change(text[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*found, change(text[at:])])


def _linked(text: str, page: str) -> str:
    text = _NAMED.sub(lambda found: _named(found[1], found[0], page), text)
    return _LINK.sub(lambda found: _link(found, page), text)


def _named(path: str, otherwise: str, page: str) -> str:
    return f"[]({_up(page)}{path})" if (DOCS / path).is_file() else otherwise


def _link(found: re.Match[str], page: str) -> str:
    text, path, anchor = found["text"], found["path"], found["anchor"] or ""
    folder = _folder(page)
    target = (folder / path).resolve()
    if not target.is_relative_to(REPOSITORY):
        return found[0]
    inside = target.relative_to(REPOSITORY).as_posix()
    if text.strip("`") in (path, inside):
        text = "" if path.endswith(".md") else text
    if target.is_relative_to(DOCS):
        return f"[{text}]({path}{anchor})"
    if inside.startswith(_RESULTS) and inside.endswith(".md"):
        return f"[{text}](#{generated.anchor(target.stem)})"
    if inside in PAGES:
        return f"[{text}]({_up(page)}{PAGES[inside]}{anchor})"
    if not target.exists():
        _log.warning("%s is not in the repository", inside, location=page)
    kind = "tree" if target.is_dir() else "blob"
    return f"[{text or inside}]({repository()}/{kind}/main/{inside}{anchor})"


def _folder(page: str) -> Path:
    """Where the links of a page begin; those of the repository's own files in the repository."""
    copies = {copy.removesuffix(".md") for copy in PAGES.values()}
    return REPOSITORY if page in copies else (DOCS / page).parent


def _up(page: str) -> str:
    return "../" * page.count("/")


@cache
def repository() -> str:
    """The address of the repository."""
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        address: str = tomllib.load(file)["project"]["urls"]["Repository"]
    return address


def prepare_docstring(
    _app: Sphinx, _what: str, _name: str, _object: object, _options: object, lines: list[str]
) -> None:
    """Pages that a docstring names are linked, as Sphinx's event ``autodoc-process-docstring`` has it."""
    lines[:] = [_IN_DOCSTRING.sub(r":doc:`/\1`", line) for line in lines]
