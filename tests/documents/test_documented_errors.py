"""Check that the errors page has a section for each class and each situation."""

import ast
import copy
import pickle
import re
from pathlib import Path

import pytest

import zerostart
from tests.documents.blocks import DOCS, REPOSITORY
from zerostart import errors

PAGE = (DOCS / "errors.md").read_text()
QUOTES = re.findall(r"^```text\n\w+: (.*)$", PAGE, re.MULTILINE)
#: Values in the quotes: words of other libraries and of the system, a phase, quoted names.
VALUES = re.compile(
    r"Tensor\.item\(\) cannot be called on meta tensors|No module named|Permission denied|"
    r"No space left on device|\bloading\b|'[^']*'"
)
CLASSES = [getattr(errors, name) for name in errors.__all__]


def headings() -> dict[str, str]:
    """Map each heading to the class of its section."""
    classes, kind = {}, ""
    for mark, heading in re.findall(r"^(##|###) (.+)$", PAGE, re.MULTILINE):
        kind = heading if mark == "##" else kind
        classes[heading] = kind
    return classes


def test_every_class_and_situation_has_its_section() -> None:
    situations = {words: kind for kind, listed in errors.SITUATIONS.items() for words in listed}
    assert headings() == {**{kind.__name__: kind.__name__ for kind in CLASSES}, **situations}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_links_to_its_section_and_says_so_once(kind: type[errors.ZerostartError]) -> None:
    error = kind("what is wrong")
    assert error.help_url == f"{errors.HELP}#{kind.__name__.lower()}"
    for copied in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (str(copied), copied.__notes__) == ("what is wrong", [f"See {error.help_url}"])


def test_the_notes_name_the_page() -> None:
    assert REPOSITORY / errors.HELP == DOCS / "errors.md"


@pytest.fixture(scope="module")
def literals() -> set[str]:
    """Parts of texts in the sources, of several words."""
    parts: set[str] = set()
    for path in Path(zerostart.__file__).parent.rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        texts = {
            node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        parts |= {text for text in texts if len(text) > 4 and " " in text}
    return parts


@pytest.mark.parametrize("quote", QUOTES, ids=lambda quote: quote[:40])
def test_quotes_are_texts_of_the_sources(quote: str, literals: set[str]) -> None:
    covered = [False] * len(quote)
    for part in literals:
        for match in re.finditer(re.escape(part), quote):
            covered[match.start() : match.end()] = [True] * len(part)
    for match in VALUES.finditer(quote):
        covered[match.start() : match.end()] = [True] * len(match[0])
    uncovered = "".join(" " if done else letter for letter, done in zip(quote, covered, strict=True))
    assert re.findall(r"(?<![\w./=:(])[a-z]{4,}(?![\w./=:(])", uncovered) == []
