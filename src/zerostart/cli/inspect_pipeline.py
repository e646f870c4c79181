"""``zerostart inspect`` of a pipeline: its models, each with its size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.formats.pipeline import Component
from zerostart.checkpoint.source import open_catalog

if TYPE_CHECKING:
    from rich.table import Table


def add_figures(table: Table, *headings: str) -> None:
    """Columns that stay whole where the terminal is narrow; the names before them are broken instead."""
    for heading in headings:
        table.add_column(heading, no_wrap=True)


def describe(component: Component, by_dtype: Callable[[Catalog], dict[str, Any]]) -> dict[str, Any]:
    """One model of a pipeline as plain data, from its headers."""
    catalog = open_catalog(component.path)
    return {
        "name": component.name,
        "class": component.kind,
        "root": catalog.root,
        "files": len(catalog.files),
        "tensor_count": len(catalog.weights),
        "parameters": sum(entry.numel for entry in catalog.weights.values()),
        "checkpoint_bytes": catalog.nbytes,
        "dtypes": by_dtype(catalog),
    }


def print_components(root: str, described: Sequence[dict[str, Any]], readable: Callable[[int], str]) -> None:
    """A table of the models, and how to name one."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from zerostart.errors import printable

    console = Console()
    console.print(f"pipeline {printable(root)}", markup=False, soft_wrap=True)
    # Below each other, for three columns of names leave no room for the figures.
    table = Table("component\nclass\ndtypes", show_lines=True)
    add_figures(table, "tensors", "parameters", "bytes")
    for one in described:
        # Text, because square brackets in a stranger's names would be read as markup.
        kind = printable(one["class"])
        names = Text(f"{one['name']}\n{kind}\n{', '.join(one['dtypes'])}", overflow="fold")
        figures = (f"{one['tensor_count']:,}", f"{one['parameters']:,}", readable(one["checkpoint_bytes"]))
        table.add_row(names, *figures)
    console.print(table)
    if described:
        first = f"{printable(root)}/{described[0]['name']}"
        console.print(f"Each is a source of its own: {first}", markup=False, soft_wrap=True)
