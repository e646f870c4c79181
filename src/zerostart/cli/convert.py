"""``zerostart convert`` and ``export``: write a checkpoint in another format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from zerostart.checkpoint.paths import scheme_of, shown_url
from zerostart.cli.options import WeightDtype

if TYPE_CHECKING:
    from zerostart.state.converting.convert import Converted


def convert(
    source: Annotated[
        str, typer.Argument(metavar="A", help="A checkpoint of any format that can be loaded, also a URL.")
    ],
    out: Annotated[
        str,
        typer.Argument(metavar="B", help="Directory to write to, or the URL of one in a store."),
    ],
    to: Annotated[Literal["hf", "dcp", "original"], typer.Option("--to", help="Format of B.")],
    dtype: Annotated[
        WeightDtype | None, typer.Option(help="Floating type of the weights; default: unchanged.")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="hf, original: maximum size of one file.")
    ] = "5GB",
) -> None:
    """Write the weights of a checkpoint in another format.

    Memory is bounded. B appears whole or not at all. Optimizer states are left out.
    """
    import zerostart

    _print_written(zerostart.convert(source, out, to, dtype=dtype, max_shard_size=max_shard_size))


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
        WeightDtype | None, typer.Option(help="Floating type of the weights; default: unchanged.")
    ] = None,
    push_to_hub: Annotated[
        str | None,
        typer.Option(metavar="REPO", help="Upload OUT to the hub with a model card, as in me/my-model."),
    ] = None,
    private: Annotated[
        bool | None,
        typer.Option("--private", help="With --push-to-hub: a private repository.", show_default=False),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Maximum size of one file.")] = "5GB",
) -> None:
    """Write a training checkpoint as an ordinary model directory.

    One process does it in bounded memory: RUN may be larger than the host memory.
    """
    if private and push_to_hub is None:
        raise typer.BadParameter("--private needs --push-to-hub")
    if push_to_hub is not None and scheme_of(out):
        raise typer.BadParameter("is for a directory, and OUT is a URL", param_hint="--push-to-hub")
    from zerostart.loading.request import dtype_of
    from zerostart.state.converting.convert import convert as convert_files

    _print_written(
        convert_files(run, out, dtype=dtype_of(dtype), max_shard_size=max_shard_size, replace=True)
    )
    if push_to_hub is not None:
        from zerostart.distributed.world import current_world
        from zerostart.state.saving.hub import push

        root = str(Path(run).absolute())
        typer.echo(f"pushed to {push(out, push_to_hub, root, current_world(), private)}")


def _print_written(converted: Converted) -> None:
    from rich.filesize import decimal

    files = f"{len(converted.files)} {'file' if len(converted.files) == 1 else 'files'}"
    sizes = f"{converted.tensors} tensors, {decimal(converted.bytes)} in {files}"
    typer.echo(f"{shown_url(str(converted.path))}: {sizes}")
