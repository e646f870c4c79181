"""The page of errors has a section for each class and each situation, and shows texts that are raised."""

import ast
import copy
import pickle
import re
import tomllib
from pathlib import Path

import pytest

import zerostart
from tests.documents.blocks import DOCS, REPOSITORY
from zerostart import errors

PAGE = (DOCS / "errors.md").read_text()
CLASSES = [getattr(errors, name) for name in errors.__all__]


def headings() -> dict[str, str]:
    """By heading the class whose section it stands in."""
    found, kind = {}, ""
    for mark, heading in re.findall(r"^(##|###) (.+)$", PAGE, re.MULTILINE):
        kind = heading if mark == "##" else kind
        found[heading] = kind
    return found


def texts() -> list[re.Pattern[str]]:
    """Every text of our source that is long enough to be told from others; what is filled in is open."""
    found = []
    for path in sorted(Path(zerostart.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            fixed = [str(p.value) if isinstance(p, ast.Constant) else None for p in parts]
            if sum(len(part or "") for part in fixed) > 12:
                found.append(re.compile("".join(".*" if p is None else re.escape(p) for p in fixed)))
    return found


def test_every_class_and_situation_has_its_section() -> None:
    situations = {words: kind for kind, listed in errors.SITUATIONS.items() for words in listed}
    assert headings() == {**{kind.__name__: kind.__name__ for kind in CLASSES}, **situations}


def test_the_texts_shown_are_those_that_are_raised() -> None:
    sources = texts()
    shown = re.findall(r"^```text\n(\w+): (.+)\n```$", PAGE, re.MULTILINE)
    assert len(shown) > len(CLASSES)
    assert [text for _, text in shown if not any(source.fullmatch(text) for source in sources)] == []
    linked = {getattr(errors, kind)(text).help_url.partition("#")[2] for kind, text in shown}
    anchors = {re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in headings()}
    assert anchors - linked <= {"zerostarterror"}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_links_to_its_section_and_says_so_once(kind: type[errors.ZerostartError]) -> None:
    error = kind("what is wrong")
    assert error.help_url == f"{errors.HELP}#{kind.__name__.lower()}"
    for same in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (str(same), same.__notes__) == ("what is wrong", [f"See {error.help_url}"])


def test_the_links_lead_into_the_projects_documentation() -> None:
    urls = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["urls"]
    assert f"{urls['Documentation']}/errors.md" == errors.HELP
