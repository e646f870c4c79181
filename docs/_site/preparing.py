"""What happens to a page before Sphinx reads it.

A line ``<!-- generated: NAME -->`` becomes the Markdown that ``generated.py`` makes under that name. Links to
files of the repository outside of ``docs`` become their names; results of benchmarks have a page.
"""

from __future__ import annotations

import re

import generated

_GENERATED = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.MULTILINE)
_OUTSIDE = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<up>(?:\.\./)+)(?P<path>[\w./-]+)(?:#[\w-]+)?\)")
_RESULTS = "benchmarks/results/"


def prepare(_app: object, page: str, source: list[str]) -> None:
    """Change the text of ``page`` in place, as Sphinx's event ``source-read`` has it."""
    depth = page.count("/")
    text = _OUTSIDE.sub(lambda found: _inside(found, depth), source[0])
    source[0] = _GENERATED.sub(lambda found: generated.markdown(found[1]), text)


def _inside(found: re.Match[str], depth: int) -> str:
    if found["up"].count("../") <= depth:
        return found[0]
    if found["path"].startswith(_RESULTS):
        return f"[{found['text']}]({'../' * depth}figures.md)"
    if found["text"] in (found["path"], f"`{found['path']}`"):
        return f"`{found['path']}`"
    return f"{found['text']} (`{found['path']}`)"
