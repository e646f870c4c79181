"""Engines, stages, placements and axes: the page has every combination, and every refusal."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract import combinations
from zerostart.errors import ConfigError
from zerostart.geometry.layout import Mesh

ROOT = Path(__file__).parents[2]
#: Where combinations are refused without a model, by file: all that these functions raise is on the page.
REFUSING = {
    "geometry/layout/parallel_plans.py": {"__post_init__"},
    "engines/deepspeed/settings.py": {"check", "_refusals", "_expert_refusals", "_tensor_refusals"},
    "engines/deepspeed/family.py": {"check"},
    "engines/fsdp2/settings.py": {"at_stage", "check_mesh"},
    "engines/fsdp2/family.py": {"check"},
}


def raised(file: Path, functions: set[str]) -> Iterator[str]:
    """What the errors of these functions say, as a pattern that has anything where they have a value."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name in functions:
            for node in ast.walk(function):
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                    if not isinstance(node.exc.args[0], ast.Name):
                        yield pattern(node.exc.args[0])
                elif isinstance(node, ast.Yield) and node.value is not None:
                    yield pattern(node.value)


def pattern(message: ast.expr) -> str:
    if isinstance(message, ast.Constant):
        return re.escape(str(message.value))
    assert isinstance(message, ast.JoinedStr)
    parts = (pattern(part) if isinstance(part, ast.Constant) else ".*" for part in message.values)
    return "".join(parts)


def test_the_page_has_what_the_engines_answer() -> None:
    found = combinations.PATH.read_text(encoding="utf-8")
    assert found == combinations.text(), "run python -m tests.contract.combinations"


def test_no_combination_is_refused_in_words_that_the_page_lacks() -> None:
    said = {sentence for *_, sentence in combinations.answers() if sentence is not None}
    with pytest.raises(ConfigError) as caught:
        Mesh(combinations.RANKS, 0)
    said.add(str(caught.value))
    patterns = [
        one for file, names in REFUSING.items() for one in raised(ROOT / "src/zerostart" / file, names)
    ]
    assert len(patterns) >= 18
    assert [one for one in patterns if not any(re.fullmatch(one, sentence) for sentence in said)] == []


def test_every_sentence_names_a_remedy() -> None:
    said = {sentence for *_, sentence in combinations.answers() if sentence is not None}
    assert [one for one in said if not re.search("; (use|choose|pass|leave|remove|set)", one)] == []


def test_what_is_served_has_its_test() -> None:
    served = {
        (engine, " + ".join(sorted(axes)))
        for engine, _, _, axes, sentence in combinations.answers()
        if sentence is None and axes
    }
    assert served == {(engine, axes) for engine, found in combinations.TRAINED.items() for axes in found}
    settings = [setting.test for found in combinations.ENGINES.values() for setting in found.values()]
    named = [*settings, *(test for found in combinations.TRAINED.values() for test in found.values())]
    files = {file for tests in named for file in tests.split(", ") if file}
    assert [file for file in files if not (ROOT / file).is_file()] == []
