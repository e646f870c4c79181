"""Outside ``engines/`` no engine's name and no ZeRO stage is compared: what differs, an ``Engine`` says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import zerostart

HOUSE = Path(zerostart.__file__).parent
NAMES = ("deepspeed", "fsdp2")
STAGES = ("stage", "zero_stage")


def comparisons(source: str) -> list[str]:
    """The expressions of a module that compare an engine's name, or a stage with a number or for truth."""
    return sorted({ast.unparse(node) for node in _compared(ast.parse(source))})


def _compared(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            absent = all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops)
            modules = ast.unparse(node.comparators[-1]) == "sys.modules"
            if (any(map(_names, sides)) and not modules) or (any(map(_is_stage, sides)) and not absent):
                yield node
        elif isinstance(node, ast.Dict) and any(key is not None and _names(key) for key in node.keys):
            yield node
        elif isinstance(node, ast.match_case):
            yield from (part for part in ast.walk(node.pattern) if _names(getattr(part, "value", part)))
        elif isinstance(node, ast.If | ast.IfExp | ast.While) and _is_stage(node.test):
            yield node.test
        elif isinstance(node, ast.BoolOp):
            yield from filter(_is_stage, node.values)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and _is_stage(node.operand):
            yield node


def _names(node: ast.AST) -> bool:
    """Whether an expression is the name of an engine, or a collection with one."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(map(_names, node.elts))
    return isinstance(node, ast.Constant) and node.value in NAMES


def _is_stage(node: ast.AST) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
    return name in STAGES


@pytest.mark.parametrize(
    "source",
    [
        "if engine.name == 'deepspeed': pass",
        "own = config.engine.name in ('fsdp2', 'other')",
        "x = 1 if 'fsdp2' != kind else 2",
        "if engine.zero_stage > 0: pass",
        "if not zero_stage: pass",
        "x = 1 if stage else 2",
        "x = {'deepspeed': 1}[name]",
        "match name:\n    case 'fsdp2': pass",
    ],
)
def test_a_comparison_is_found(source: str) -> None:
    assert comparisons(source)


@pytest.mark.parametrize(
    "source", ["run('deepspeed', zero_stage=3)", "'deepspeed' in sys.modules", "zero_stage is None"]
)
def test_naming_is_allowed(source: str) -> None:
    assert not comparisons(source)


def test_nothing_outside_the_engines_asks_which_it_is() -> None:
    files = [path for path in HOUSE.rglob("*.py") if HOUSE / "engines" not in path.parents]
    assert len(files) > 100
    found = {str(path.relative_to(HOUSE)): comparisons(path.read_text()) for path in files}
    assert {path: made for path, made in found.items() if made} == {}
