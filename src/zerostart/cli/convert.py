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
    zero = "zero"
    universal = "universal"
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
    world_size: Annotated[
        int, typer.Option(metavar="N", min=1, help="zero, universal: ranks that will load it.")
    ] = 1,
    zero_stage: Annotated[
        int, typer.Option(metavar="S", min=1, max=3, help="zero, universal: stage of the engine that will.")
    ] = 3,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail where B cannot hold all that A has.")
    ] = False,
    nproc: Annotated[int, typer.Option("--nproc", metavar="N", min=1, help="Local processes.")] = 1,
) -> None:
    """Write a checkpoint in another format, files to files.

    In bounded memory, whatever the size of the model. What was killed goes on where it stopped when the same
    command is given again; B appears whole or not at all.
    """
    from rich.filesize import decimal

    options = {
        "source": source,
        "out": out,
        "to": to.value,
        "dtype": None if dtype is None else dtype.value,
        "max_shard_size": max_shard_size,
        "world_size": world_size,
        "zero_stage": zero_stage,
        "strict": strict,
    }
    if nproc == 1:
        made = _converted(options)
    else:
        made = run_local_ranks("zerostart.cli.convert", [json.dumps(options)], nproc)[0]
    count = len(made["files"])
    files = f"{count} {'file' if count == 1 else 'files'}"
    typer.echo(f"{shown_url(made['path'])}: {made['tensors']} tensors, {decimal(made['bytes'])} in {files}")
    if made["kept_bytes"]:
        typer.echo(f"{decimal(made['kept_bytes'])} were there already, and are as they were written")
    if made["staged_bytes"]:
        typer.echo(f"{decimal(made['staged_bytes'])} were staged on disk first: the store takes files whole")
    if made["left_out"]:
        typer.echo(f"Left out, since {to.value} does not hold it: {'; '.join(made['left_out'])}")


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
