"""Check the imports of examples and benchmarks, which no other test imports."""

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for folder in ("examples", "benchmarks") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_imported_from_zerostart_exist(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "zerostart":
            module = importlib.import_module(node.module)
            missing = [alias.name for alias in node.names if not _has(module, alias.name)]
            assert missing == [], f"{path.name}, line {node.lineno}"


def _has(module, name):
    return hasattr(module, name) or importlib.util.find_spec(f"{module.__name__}.{name}") is not None
