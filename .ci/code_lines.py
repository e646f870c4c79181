"""Fail if `src/zerostart` has more code lines than `max-code-lines` in pyproject.toml.

A code line is neither blank, nor a comment, nor part of an import or a docstring.
"""

import ast
import sys
import tomllib
from pathlib import Path


def count_code_lines(path: Path) -> int:
    """Count the code lines of one Python file."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    skipped = {n for n, line in enumerate(lines, 1) if not line.strip() or line.strip().startswith("#")}
    docstrings: set[int] = set()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines) - len(skipped | docstrings)


def main() -> None:
    root = Path(__file__).parents[1]
    with (root / "pyproject.toml").open("rb") as file:
        limit = tomllib.load(file)["tool"]["zerostart"]["max-code-lines"]
    total = sum(count_code_lines(path) for path in (root / "src/zerostart").rglob("*.py"))
    print(f"{total} code lines in src/zerostart, at most {limit} allowed")
    if total > limit:
        sys.exit("delete as many code lines as the change adds")


if __name__ == "__main__":
    main()
