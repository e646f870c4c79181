"""``zerostart inspect`` of a pipeline: its models, each with its size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.pipeline import Component
from zerostart.checkpoint.source import open_catalog

__all__ = ["describe", "print_components"]


def describe(component: Component, by_dtype: Callable[[Catalog], dict[str, Any]]) -> dict[str, Any]:
    """One model of a pipeline as plain data, from its headers."""
    catalog = open_catalog(component.path)
    return {
        "name": component.name,
        "class": component.kind,
        "root": catalog.root,
        "files": len(catalog.files),
        "tensor_count": len(catalog.tensors),
        "parameters": sum(entry.numel for entry in catalog.tensors.values()),
        "checkpoint_bytes": catalog.nbytes,
        "dtypes": by_dtype(catalog),
    }


def print_components(root: str, described: Sequence[dict[str, Any]], readable: Callable[[int], str]) -> None:
    """A table of the models, and how to name one."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(Text(f"pipeline {root}", overflow="fold"))
    table = Table("component", "class", "dtypes", "tensors", "parameters", "bytes")
    for one in described:
        cells = (
            one["name"],
            one["class"],
            ", ".join(one["dtypes"]),
            f"{one['tensor_count']:,}",
            f"{one['parameters']:,}",
            readable(one["checkpoint_bytes"]),
        )
        # Text, because square brackets in a stranger's names would be read as markup.
        table.add_row(*(Text(cell, overflow="fold") for cell in cells))
    console.print(table)
    if described:
        console.print(Text(f"Each is a source of its own: {root}/{described[0]['name']}", overflow="fold"))
