"""``zerostart convert``: write a checkpoint in another format."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from zerostart.checkpoint.paths import shown_url


class _Format(enum.StrEnum):
    hf = "hf"
    dcp = "dcp"
    original = "original"


class Dtype(enum.StrEnum):
    """Types that weights are written in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def command(
    source: Annotated[
        str, typer.Argument(metavar="A", help="A checkpoint of any format that can be loaded, also a URL.")
    ],
    out: Annotated[
        str,
        typer.Argument(metavar="B", help="Directory to write to, or the URL of one in a store."),
    ],
    to: Annotated[_Format, typer.Option("--to", help="Format of B.")],
    dtype: Annotated[
        Dtype | None, typer.Option(help="Floating type of the weights; without it each stays as it is.")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="hf, original: most bytes of one file.")
    ] = "5GB",
) -> None:
    """Write the weights of a checkpoint in another format.

    Memory is bounded. B appears whole or not at all. The states of an optimizer are left out.
    """
    from rich.filesize import decimal

    import zerostart

    name = None if dtype is None else dtype.value
    made = zerostart.convert(source, out, to.value, dtype=name, max_shard_size=max_shard_size)
    files = f"{len(made.files)} {'file' if len(made.files) == 1 else 'files'}"
    typer.echo(f"{shown_url(str(made.path))}: {made.tensors} tensors, {decimal(made.bytes)} in {files}")
