"""``zerostart inspect``, ``verify`` and ``diff``: what checkpoints hold, alone and beside each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerostart.checkpoint.catalog import Assembled, Catalog, TensorEntry
from zerostart.checkpoint.strict_json import dump_json
from zerostart.cli.options import Download, fetched

if TYPE_CHECKING:
    from rich.table import Table

    from zerostart.checkpoint.formats.pipeline import Component

_LARGEST = 5


def inspect(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="Directory, file, URL, or hub id in the local cache."),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything, tensor by tensor, as JSON.")
    ] = False,
    download: Download = False,
) -> None:
    """Show files, tensors and sizes of a checkpoint.

    Reads no weights. Of a diffusers pipeline it shows the models, each of which is a source of its own.
    """
    from zerostart.checkpoint.formats.pipeline import components
    from zerostart.checkpoint.source import open_catalog, read_config, resolve_source
    from zerostart.checkpoint.storage import scheme_of

    source = fetched(source, download)
    path = None if scheme_of(source) else resolve_source(source)
    found = components(path) if path is not None and path.is_dir() else None
    if found is not None:
        described = [_describe(component) for component in found]
        if as_json:
            print(dump_json({"root": str(path), "components": described}, indent=1))
        else:
            _print_components(str(path), described)
        return
    catalog = open_catalog(source)
    config = read_config(catalog.root) or {} if catalog.root else {}
    if as_json:
        print(dump_json(_document(catalog, config), indent=1))
    else:
        _print_summary(catalog, config)


def _architectures(config: dict[str, Any]) -> list[str]:
    named = config.get("architectures", [config["_class_name"]] if "_class_name" in config else None)
    return [str(name) for name in named] if isinstance(named, list) else []


def _largest(catalog: Catalog, count: int) -> list[TensorEntry | Assembled]:
    return sorted(catalog.weights.values(), key=lambda entry: (-entry.nbytes, entry.name))[:count]


def _by_dtype(catalog: Catalog) -> dict[str, dict[str, int]]:
    tensors, elements, size = Counter[str](), Counter[str](), Counter[str]()
    for entry in catalog.weights.values():
        tensors[entry.dtype] += 1
        elements[entry.dtype] += entry.numel
        size[entry.dtype] += entry.nbytes
    ordered = sorted(size, key=lambda dtype: (-size[dtype], dtype))
    return {
        dtype: {"tensors": tensors[dtype], "parameters": elements[dtype], "bytes": size[dtype]}
        for dtype in ordered
    }


def _names(catalog: Catalog) -> list[str]:
    return [file.removeprefix(catalog.place).lstrip("/") for file in catalog.files]


def _document(catalog: Catalog, config: dict[str, Any]) -> dict[str, Any]:
    names = _names(catalog)
    entries = list(catalog.weights.values())
    largest = _largest(catalog, 1)
    return {
        "root": catalog.place,
        "files": names,
        "file_bytes": list(catalog.sizes),
        "tensor_count": len(entries),
        "parameters": sum(entry.numel for entry in entries),
        "checkpoint_bytes": catalog.nbytes,
        "dtypes": _by_dtype(catalog),
        "largest_tensor": largest[0].name if largest else None,
        "largest_tensor_bytes": largest[0].nbytes if largest else 0,
        "model_type": config.get("model_type"),
        "architectures": _architectures(config),
        "metadata": dict(catalog.metadata),
        "tensors": [
            {
                "name": entry.name,
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                # None of both where the ranks of a job hold a part each.
                "file": names[entry.file] if isinstance(entry, TensorEntry) else None,
                "offset": entry.offset if isinstance(entry, TensorEntry) else None,
                "nbytes": entry.nbytes,
            }
            for entry in entries
        ],
    }


def _print_summary(catalog: Catalog, config: dict[str, object]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from zerostart.errors import printable

    console = Console()
    facts = Table.grid(padding=(0, 2))
    rows = {
        "checkpoint": catalog.place,
        "architecture": ", ".join(_architectures(config)) or "not stated",
        "files": f"{len(catalog.files):,}",
        "tensors": f"{len(catalog.weights):,}",
        "parameters": f"{sum(entry.numel for entry in catalog.weights.values()):,}",
        "bytes": f"{catalog.nbytes:,} ({readable(catalog.nbytes)})",
    }
    for name, value in rows.items():
        facts.add_row(name, Text(printable(value), overflow="fold"))
    console.print(facts)
    kinds = Table("dtype", title="By element type", title_justify="left")
    _add_figures(kinds, "tensors", "parameters", "bytes")
    for dtype, counts in _by_dtype(catalog).items():
        kinds.add_row(dtype, f"{counts['tensors']:,}", f"{counts['parameters']:,}", readable(counts["bytes"]))
    console.print(kinds)
    table = Table("tensor", title="Largest tensors", title_justify="left")
    _add_figures(table, "dtype", "shape", "bytes")
    for entry in _largest(catalog, _LARGEST):
        # Text, because square brackets in a stranger's names would be read as markup.
        figures = (Text(entry.dtype), Text(str(list(entry.shape))), readable(entry.nbytes))
        table.add_row(Text(printable(entry.name), overflow="fold"), *figures)
    console.print(table)


def readable(count: int) -> str:
    """Format bytes in decimal units, as the hub and ``--max-shard-size`` count them."""
    from rich.filesize import decimal

    return decimal(count)


def _add_figures(table: Table, *headings: str) -> None:
    for heading in headings:
        table.add_column(heading, no_wrap=True)


def _describe(component: Component) -> dict[str, object]:
    """One model of a pipeline as plain data, from its headers."""
    from zerostart.checkpoint.source import open_catalog

    catalog = open_catalog(component.path)
    return {
        "name": component.name,
        "class": component.kind,
        "root": catalog.place,
        "files": len(catalog.files),
        "tensor_count": len(catalog.weights),
        "parameters": sum(entry.numel for entry in catalog.weights.values()),
        "checkpoint_bytes": catalog.nbytes,
        "dtypes": _by_dtype(catalog),
    }


def _print_components(root: str, described: Sequence[dict[str, Any]]) -> None:
    """A table of the models, and how to name one."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from zerostart.errors import printable

    console = Console()
    console.print(f"pipeline {printable(root)}", markup=False, soft_wrap=True)
    # Below each other, for three columns of names leave no room for the figures.
    table = Table("component\nclass\ndtypes", show_lines=True)
    _add_figures(table, "tensors", "parameters", "bytes")
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


def verify(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A directory that zerostart has saved, or its URL.")
    ],
) -> None:
    """Check a saved checkpoint by the digests beside it.

    Reads each file once. A file or tensor that is not as it was saved ends it with status 1.
    """
    import zerostart
    from zerostart.checkpoint.paths import shown_url
    from zerostart.errors import printable

    found = zerostart.verify(path)
    what = f"{found.files:,} files, {found.tensors:,} tensors, {readable(found.bytes)}"
    print(f"{printable(shown_url(path))}: {what}, all as they were saved")


_DIFFERENT = 1


def diff(
    a: Annotated[
        str,
        typer.Argument(metavar="A", help="A checkpoint: directory, file, URL, or hub id in the local cache."),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print all names as JSON.")] = False,
) -> None:
    """Compare two checkpoints, tensor by tensor.

    By their names, bit by bit. Exits with status 1 where there is a difference.
    """
    import zerostart
    from zerostart.checkpoint.strict_json import dump_json

    found = zerostart.diff(a, b)
    print(dump_json(found.document(), indent=1) if as_json else found)
    if not found.same:
        raise typer.Exit(_DIFFERENT)
