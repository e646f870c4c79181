"""No name of an engine or a model library is compared outside its room, nor a stage outside ``engines/``.

What differs between them, an ``Engine`` or a ``ModelLibrary`` says.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import zerostart


@dataclass(frozen=True)
class Room:
    """What is compared in one room alone."""

    names: tuple[str, ...]
    stages: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()

    def compared(self, tree: ast.Module) -> Iterator[ast.AST]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                absent = all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops)
                modules = ast.unparse(node.comparators[-1]) == "sys.modules"
                if (any(map(self._names, sides)) and not modules) or (
                    any(map(self._is_stage, sides)) and not absent
                ):
                    yield node
            elif isinstance(node, ast.Dict) and any(
                key is not None and self._names(key) for key in node.keys
            ):
                yield node
            elif isinstance(node, ast.match_case):
                parts = ast.walk(node.pattern)
                yield from (part for part in parts if self._names(getattr(part, "value", part)))
            elif isinstance(node, ast.If | ast.IfExp | ast.While) and self._is_stage(node.test):
                yield node.test
            elif isinstance(node, ast.BoolOp):
                yield from filter(self._is_stage, node.values)
            elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
                yield from filter(self._is_stage, [node.operand])
            elif isinstance(node, ast.Call) and _last(node.func) in self.calls:
                yield node

    def _names(self, node: ast.AST) -> bool:
        """Whether an expression is one of the names, or a collection with one."""
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return any(map(self._names, node.elts))
        return isinstance(node, ast.Constant) and node.value in self.names

    def _is_stage(self, node: ast.AST) -> bool:
        return _last(node) in self.stages


def _last(node: ast.AST) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)


HOUSE = Path(zerostart.__file__).parent
#: By room: names that are compared in it alone, variables that are, and functions that are called there.
ROOMS = {
    "engines": Room(("deepspeed", "fsdp2"), ("stage", "zero_stage")),
    "models": Room(("transformers", "diffusers", "plain"), (), ("is_pretrained", "is_diffusers")),
}


def comparisons(source: str, room: Room) -> list[str]:
    """The expressions of a module that compare what only ``room`` compares, or ask whether it is that."""
    return sorted({ast.unparse(node) for node in room.compared(ast.parse(source))})


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
    assert comparisons(source, ROOMS["engines"])


@pytest.mark.parametrize(
    "source",
    ["library.name == 'diffusers'", "upstream.is_pretrained(model)", "x = {'transformers': 1}[name]"],
)
def test_a_question_for_the_library_is_found(source: str) -> None:
    assert comparisons(source, ROOMS["models"])


@pytest.mark.parametrize(
    "source", ["run('deepspeed', zero_stage=3)", "'deepspeed' in sys.modules", "zero_stage is None"]
)
def test_naming_is_allowed(source: str) -> None:
    assert not comparisons(source, ROOMS["engines"])


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_outside_a_room_asks_which_it_is(room: str) -> None:
    own = (HOUSE / room, *([HOUSE / "upstream"] if ROOMS[room].calls else ()))  # upstream/ defines the calls
    files = [path for path in HOUSE.rglob("*.py") if not any(folder in path.parents for folder in own)]
    assert len(files) > 100
    found = {str(path.relative_to(HOUSE)): comparisons(path.read_text(), ROOMS[room]) for path in files}
    assert {path: made for path, made in found.items() if made} == {}
