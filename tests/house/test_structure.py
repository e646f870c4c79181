"""Check the structure of `docs/architecture.md`: rooms, imports between them, no import circles."""

import ast
from collections.abc import Mapping
from pathlib import Path

import zerostart

ROOT = Path(zerostart.__file__).parent
#: Public modules. With the errors and ``python -m zerostart``, they are the only modules outside a room.
DOORS = {"zerostart", "zerostart.activation", "zerostart.pipelines", "zerostart.serving"}
OUTSIDE = DOORS | {"zerostart.errors", "zerostart.__main__"}
#: Rooms of the list in `docs/architecture.md`, and pairs of rooms of which one imports the other.
MAX_ROOMS, MAX_IMPORTS = 16, 92


def module_name(path: Path) -> str:
    parts = ("zerostart", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {module_name(path): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def targets(node: ast.AST) -> set[str]:
    """Return the modules of zerostart that an import statement names."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names if alias.name in TREES}
    if isinstance(node, ast.ImportFrom) and node.module in TREES:
        parts = {f"{node.module}.{alias.name}" for alias in node.names}
        inner = parts & TREES.keys()
        return inner if len(inner) == len(parts) else inner | {node.module}
    return set()


def imports() -> dict[str, set[str]]:
    """Map each module to the modules that it imports anywhere."""
    return {
        name: {target for node in ast.walk(tree) for target in targets(node)} - {name}
        for name, tree in TREES.items()
    }


def circles(graph: Mapping[str, set[str]]) -> list[str]:
    """List the groups of modules that import each other, directly or not."""
    reachable: dict[str, set[str]] = {}
    for start in graph:
        visited, queue = set[str](), [start]
        while queue:
            for module in graph[queue.pop()] - visited:
                visited.add(module)
                queue.append(module)
        reachable[start] = visited
    return sorted(
        {", ".join(sorted(m for m in graph if m in reachable[n] and n in reachable[m])) for n in graph} - {""}
    )


def room(module: str) -> str:
    return module.split(".")[1] if module not in OUTSIDE else ""


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Count imports in functions, too."""
    assert circles(imports()) == []


def test_no_module_lies_outside_a_room() -> None:
    assert [n for n in TREES if n not in OUTSIDE and not (ROOT / room(n) / "__init__.py").is_file()] == []


def test_rooms_and_imports_between_them_do_not_grow() -> None:
    graph = imports()
    pairs = {(room(a), room(b)) for a in graph for b in graph[a] if room(a) and room(b)}
    pairs = {(a, b) for a, b in pairs if a != b}
    rooms = {room(module) for module in TREES} - {""}
    assert len(rooms) <= MAX_ROOMS, sorted(rooms)
    assert len(pairs) <= MAX_IMPORTS, sorted(pairs)


def test_only_engines_import_engine_internals() -> None:
    """Other rooms get masters, moments, counters and shards of a live model from ``engines``."""
    internals = ("zerostart.upstream.deepspeed.engine.", "zerostart.upstream.torch.fsdp2.")
    outside = {name for name in TREES if room(name) not in ("engines", "upstream", "")}
    graph = imports()
    violations = [(a, b) for a in outside for b in graph[a] if f"{b}.".startswith(internals)]
    assert sorted(violations) == []
