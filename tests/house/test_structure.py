"""The house as `docs/architecture.md` draws it, by syntax trees: rooms, arrows, circles."""

import ast
from collections.abc import Mapping
from pathlib import Path

import zerostart

ROOT = Path(zerostart.__file__).parent
#: The doors, the tree of errors, and ``python -m zerostart``: the only modules outside a room.
DOORS = {"zerostart", "zerostart.activation", "zerostart.pipelines", "zerostart.serving"}
OUTSIDE = DOORS | {"zerostart.errors", "zerostart.__main__"}
#: The rooms of the list in `docs/architecture.md`. ``refit`` has 12 of the arrows, which no other room needs.
MOST_ROOMS, MOST_ARROWS = 16, 92


def name_of(path: Path) -> str:
    parts = ("zerostart", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {name_of(path): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def targets(node: ast.AST) -> set[str]:
    """The modules of zerostart that an import statement names."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names if alias.name in TREES}
    if isinstance(node, ast.ImportFrom) and node.module in TREES:
        parts = {f"{node.module}.{alias.name}" for alias in node.names}
        inner = parts & TREES.keys()
        return inner if len(inner) == len(parts) else inner | {node.module}
    return set()


def imports() -> dict[str, set[str]]:
    """The modules that each module imports, in its functions and for types alone too."""
    return {
        name: {target for node in ast.walk(tree) for target in targets(node)} - {name}
        for name, tree in TREES.items()
    }


def circles(graph: Mapping[str, set[str]]) -> list[str]:
    """Sets of modules of which each leads to each other, in words."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen, left = set[str](), [start]
        while left:
            for following in graph[left.pop()] - seen:
                seen.add(following)
                left.append(following)
        reached[start] = seen
    return sorted(
        {", ".join(sorted(m for m in graph if m in reached[n] and n in reached[m])) for n in graph} - {""}
    )


def room(module: str) -> str:
    return module.split(".")[1] if module not in OUTSIDE else ""


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Nor when their functions are called: an import in a function saves time, and hides no circle."""
    assert circles(imports()) == []


def test_no_module_lies_outside_a_room() -> None:
    assert [n for n in TREES if n not in OUTSIDE and not (ROOT / room(n) / "__init__.py").is_file()] == []


def test_rooms_and_the_arrows_between_them() -> None:
    graph = imports()
    arrows = {(room(a), room(b)) for a in graph for b in graph[a] if room(a) and room(b)}
    arrows = {(a, b) for a, b in arrows if a != b}
    rooms = {room(module) for module in TREES} - {""}
    assert len(rooms) <= MOST_ROOMS, sorted(rooms)
    assert len(arrows) <= MOST_ARROWS, sorted(arrows)


def test_what_an_engine_keeps_is_asked_of_the_engine() -> None:
    """Masters, moments, counters and shards of a live model: no room above asks the library itself."""
    inside = ("zerostart.upstream.deepspeed.engine", "zerostart.upstream.torch.fsdp2")
    above = {name for name in TREES if room(name) not in ("engines", "upstream", "")}
    graph = imports()
    asked = [(a, b) for a in above for b in graph[a] if f"{b}.".startswith(tuple(f"{i}." for i in inside))]
    assert sorted(asked) == []
