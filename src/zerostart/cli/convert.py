"""``zerostart convert`` and ``export``: write a checkpoint in another format, or as a model directory."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from zerostart.checkpoint.paths import scheme_of, shown_url


class _Format(enum.StrEnum):
    hf = "hf"
    dcp = "dcp"
    original = "original"


class _Dtype(enum.StrEnum):
    """Types that weights are written in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def convert(
    source: Annotated[
        str, typer.Argument(metavar="A", help="A checkpoint of any format that can be loaded, also a URL.")
    ],
    out: Annotated[
        str,
        typer.Argument(metavar="B", help="Directory to write to, or the URL of one in a store."),
    ],
    to: Annotated[_Format, typer.Option("--to", help="Format of B.")],
    dtype: Annotated[
        _Dtype | None, typer.Option(help="Floating type of the weights; without it each stays as it is.")
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


def export(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A checkpoint of zerostart, DeepSpeed, torch.distributed.checkpoint or accelerate, or any "
            "other that can be loaded.",
        ),
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="Directory to write to, or a URL of a store.")],
    dtype: Annotated[
        _Dtype | None, typer.Option(help="Floating type of the weights; without it each stays as it is.")
    ] = None,
    push_to_hub: Annotated[
        str | None,
        typer.Option(metavar="REPO", help="Upload OUT to the hub with a model card, as in me/my-model."),
    ] = None,
    private: Annotated[
        bool | None,
        typer.Option("--private", help="With --push-to-hub: a private repository.", show_default=False),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Most bytes of one file.")] = "5GB",
) -> None:
    """Write a training checkpoint as an ordinary model directory.

    One process does it, in bounded memory: RUN may be larger than the machine's.
    """
    if private and push_to_hub is None:
        raise typer.BadParameter("--private is of --push-to-hub, which was not given")
    if push_to_hub is not None and scheme_of(out):
        raise typer.BadParameter("is for a directory, and OUT is a URL", param_hint="--push-to-hub")
    import torch
    from rich.filesize import decimal

    from zerostart.state.converting.convert import export as export_files

    chosen = None if dtype is None else getattr(torch, dtype.value)
    made = export_files(run, out, chosen, max_shard_size)
    files = f"{len(made.files)} {'file' if len(made.files) == 1 else 'files'}"
    typer.echo(f"{shown_url(str(made.path))}: {made.tensors} tensors, {decimal(made.bytes)} in {files}")
    if push_to_hub is not None:
        from zerostart.distributed.world import current_world
        from zerostart.state.saving.hub import push

        root = str(Path(run).absolute())
        typer.echo(f"pushed to {push(out, push_to_hub, root, current_world(), private)}")
