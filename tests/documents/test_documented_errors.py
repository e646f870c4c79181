"""Check that the errors page has a section for each class and each situation."""

import copy
import pickle
import re

import pytest

from tests.documents.blocks import DOCS, REPOSITORY
from zerostart import errors

PAGE = (DOCS / "errors.md").read_text()
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
