"""Compare the page of combinations with the engines' answers."""

import re

from tests.contract import combinations


def test_the_page_has_the_engines_answers() -> None:
    page = combinations.PATH.read_text(encoding="utf-8")
    assert page == combinations.text(), "run python -m tests.contract.combinations"


def test_every_refusal_names_a_remedy() -> None:
    sentences = {sentence for *_, sentence in combinations.answers() if sentence is not None}
    assert [s for s in sentences if not re.search("; (use|choose|pass|leave|remove|set)", s)] == []
