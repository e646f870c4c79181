"""The page of engines, stages, placements and axes has what the engines answer."""

import re

from tests.contract import combinations


def test_the_page_has_what_the_engines_answer() -> None:
    found = combinations.PATH.read_text(encoding="utf-8")
    assert found == combinations.text(), "run python -m tests.contract.combinations"


def test_every_refusal_names_a_remedy() -> None:
    said = {sentence for *_, sentence in combinations.answers() if sentence is not None}
    assert [one for one in said if not re.search("; (use|choose|pass|leave|remove|set)", one)] == []
