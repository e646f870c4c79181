"""``zerostart inspect``, ``verify`` and ``diff``: show, check and compare checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerostart.checkpoint.catalog import Assembled, Catalog, TensorEntry
from zerostart.checkpoint.strict_json import dump_json
from zerostart.cli.options import Download, download_if

if TYPE_CHECKING:
    from zerostart.checkpoint.formats.pipeline import Component

_LARGEST = 5


def inspect(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="Directory, file, URL, or hub id in the local cache."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print all tensors as JSON.")] = False,
    download: Download = False,
) -> None:
    """Show files, tensors and sizes of a checkpoint.

    Reads no weights. For a diffusers pipeline it shows the models, each of which is also a source.
    """
    from zerostart.checkpoint.formats.pipeline import components
    from zerostart.checkpoint.source import open_catalog, read_config, resolve_source
    from zerostart.checkpoint.storage import scheme_of

    source = download_if(source, download)
    path = None if scheme_of(source) else resolve_source(source)
    models = components(path) if path is not None and path.is_dir() else None
    if models is not None:
        described = [_describe_component(component) for component in models]
        if as_json:
            print(dump_json({"root": str(path), "components": described}, indent=1))
        else:
            _print_components(str(path), described)
        return
    catalog = open_catalog(source)
    config = read_config(catalog.root) or {} if catalog.root else {}
    if as_json:
        print(dump_json(_describe_catalog(catalog, config), indent=1))
    else:
        _print_summary(catalog, config)


def _list_architectures(config: dict[str, Any]) -> list[str]:
    named = config.get("architectures", [config["_class_name"]] if "_class_name" in config else None)
    return [str(name) for name in named] if isinstance(named, list) else []


def _find_largest(catalog: Catalog, count: int) -> list[TensorEntry | Assembled]:
    return sorted(catalog.weights.values(), key=lambda entry: (-entry.nbytes, entry.name))[:count]


def _count_by_dtype(catalog: Catalog) -> dict[str, dict[str, int]]:
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


def _list_files(catalog: Catalog) -> list[str]:
    return [file.removeprefix(catalog.place).lstrip("/") for file in catalog.files]


def _describe_catalog(catalog: Catalog, config: dict[str, Any]) -> dict[str, Any]:
    names = _list_files(catalog)
    entries = list(catalog.weights.values())
    largest = _find_largest(catalog, 1)
    return {
        "root": catalog.place,
        "files": names,
        "file_bytes": list(catalog.sizes),
        "tensor_count": len(entries),
        "parameters": sum(entry.numel for entry in entries),
        "checkpoint_bytes": catalog.nbytes,
        "dtypes": _count_by_dtype(catalog),
        "largest_tensor": largest[0].name if largest else None,
        "largest_tensor_bytes": largest[0].nbytes if largest else 0,
        "model_type": config.get("model_type"),
        "architectures": _list_architectures(config),
        "metadata": dict(catalog.metadata),
        "tensors": [
            {
                "name": entry.name,
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                # None if the ranks of a job hold a part each.
                "file": names[entry.file] if isinstance(entry, TensorEntry) else None,
                "offset": entry.offset if isinstance(entry, TensorEntry) else None,
                "nbytes": entry.nbytes,
            }
            for entry in entries
        ],
    }


def _print_summary(catalog: Catalog, config: dict[str, object]) -> None:
    from zerostart.errors import printable

    facts = {
        "checkpoint": catalog.place,
        "architecture": ", ".join(_list_architectures(config)) or "not stated",
        "files": f"{len(catalog.files):,}",
        "tensors": f"{len(catalog.weights):,}",
        "parameters": f"{sum(entry.numel for entry in catalog.weights.values()):,}",
        "bytes": f"{catalog.nbytes:,} ({format_bytes(catalog.nbytes)})",
    }
    for name, value in facts.items():
        print(f"{name:<12}  {printable(value)}")
    _print_table(
        "By element type",
        ("dtype", "tensors", "parameters", "bytes"),
        [
            (dtype, f"{counts['tensors']:,}", f"{counts['parameters']:,}", format_bytes(counts["bytes"]))
            for dtype, counts in _count_by_dtype(catalog).items()
        ],
    )
    _print_table(
        "Largest tensors",
        ("tensor", "dtype", "shape", "bytes"),
        [
            (entry.name, entry.dtype, str(list(entry.shape)), format_bytes(entry.nbytes))
            for entry in _find_largest(catalog, _LARGEST)
        ],
    )


def _print_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table that breaks only its first column where the terminal is narrow."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from zerostart.errors import printable

    table = Table(headings[0], title=Text(title), title_justify="left")
    for heading in headings[1:]:
        table.add_column(heading, no_wrap=True)
    for first, *figures in rows:
        # Text, because square brackets in a stranger's names would be read as markup.
        name = Text("\n".join(map(printable, first.split("\n"))), overflow="fold")
        table.add_row(name, *map(Text, figures))
    Console().print(table)


def format_bytes(count: int) -> str:
    """Format bytes in decimal units, as the hub and ``--max-shard-size`` count them."""
    from rich.filesize import decimal

    return decimal(count)


def _describe_component(component: Component) -> dict[str, object]:
    """Describe one model of a pipeline as plain data."""
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
        "dtypes": _count_by_dtype(catalog),
    }


def _print_components(root: str, described: Sequence[dict[str, Any]]) -> None:
    from zerostart.errors import printable

    _print_table(
        f"pipeline {printable(root)}",
        # One column, since three columns of names leave no room for the figures.
        ("component\nclass\ndtypes", "tensors", "parameters", "bytes"),
        [
            (
                f"{one['name']}\n{one['class']}\n{', '.join(one['dtypes'])}",
                f"{one['tensor_count']:,}",
                f"{one['parameters']:,}",
                format_bytes(one["checkpoint_bytes"]),
            )
            for one in described
        ],
    )
    if described:
        print(f"Each is a source of its own: {printable(root)}/{described[0]['name']}")


def verify(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A directory that zerostart saved, or its URL.")
    ],
) -> None:
    """Check a saved checkpoint against its recorded digests.

    Reads each file once. Exits with status 1 if a file or tensor has changed.
    """
    import zerostart
    from zerostart.checkpoint.paths import shown_url
    from zerostart.errors import printable

    verified = zerostart.verify(path)
    counts = f"{verified.files:,} files, {verified.tensors:,} tensors, {format_bytes(verified.bytes)}"
    print(f"{printable(shown_url(path))}: {counts}, all as they were saved")


_DIFFERENT = 1


def diff(
    a: Annotated[
        str,
        typer.Argument(metavar="A", help="A checkpoint: directory, file, URL, or hub id in the local cache."),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="Another checkpoint.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print all names as JSON.")] = False,
) -> None:
    """Compare two checkpoints, tensor by tensor.

    Compares tensors of equal names bit by bit. Exits with status 1 if there is a difference.
    """
    import zerostart
    from zerostart.checkpoint.strict_json import dump_json

    difference = zerostart.diff(a, b)
    print(dump_json(difference.document(), indent=1) if as_json else difference)
    if not difference.same:
        raise typer.Exit(_DIFFERENT)
