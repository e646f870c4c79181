"""``zerostart convert``: a checkpoint in another format.

Also the worker of its own local ranks: ``python -m zerostart.cli.convert OPTIONS-AS-JSON``.
"""

from __future__ import annotations

import enum
import json
from typing import Annotated, Any

import typer

from zerostart.checkpoint.paths import shown_url
from zerostart.cli.launch import join_group, leave_group, run_local_ranks, worker_main


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
    nproc: Annotated[int, typer.Option("--nproc", metavar="N", min=1, help="Local processes.")] = 1,
) -> None:
    """Write the weights of a checkpoint in another format, in bounded memory.

    B appears whole or not at all. The states of an optimizer are left out.
    """
    from rich.filesize import decimal

    options = {
        "source": source,
        "out": out,
        "to": to.value,
        "dtype": None if dtype is None else dtype.value,
        "max_shard_size": max_shard_size,
    }
    if nproc == 1:
        made = _converted(options)
    else:
        made = run_local_ranks("zerostart.cli.convert", [json.dumps(options)], nproc)[0]
    count = len(made["files"])
    files = f"{count} {'file' if count == 1 else 'files'}"
    typer.echo(f"{shown_url(made['path'])}: {made['tensors']} tensors, {decimal(made['bytes'])} in {files}")


def _converted(options: dict[str, Any]) -> dict[str, Any]:
    import zerostart

    made = zerostart.convert(**options)
    return {**vars(made), "path": str(made.path)}


def _run(argv: list[str]) -> dict[str, Any]:
    """One rank's part."""
    join_group()
    made = _converted(json.loads(argv[0]))
    leave_group()
    return made


if __name__ == "__main__":
    worker_main(_run)
