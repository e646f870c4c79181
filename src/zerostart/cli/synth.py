"""``zerostart synth``: a checkpoint of random weights in the layout of a real one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from zerostart.cli.options import WeightDtype, parse_value


def command(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG_OR_MODEL_TYPE",
            help="A config.json, a directory that holds one, or a transformers model type such as qwen3_moe.",
        ),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Directory to write to; a checkpoint in it is replaced.")
    ],
    size: Annotated[
        Literal["tiny"] | None, typer.Option(help="tiny: the architecture with a few layers and experts.")
    ] = None,
    sparse: Annotated[
        bool, typer.Option("--sparse", help="Files of full size that hold no data and take no space.")
    ] = False,
    dtype: Annotated[
        WeightDtype | None, typer.Option(help="Element type; default: the configuration's, else bfloat16.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = 0,
    max_shard_size: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Maximum size of the tensors in one file."),
    ] = "5GB",
) -> None:
    """Write random weights in the layout of a real model.

    For rehearsals, benchmarks and tests: transformers loads the model as one from the hub. No tokenizer.
    """
    from rich.filesize import decimal

    from zerostart.models.synth import synthesise

    result = synthesise(
        config,
        out,
        size=size,
        sparse=sparse,
        dtype=dtype,
        seed=seed,
        max_shard_size=parse_value("size", max_shard_size),
    )
    for name in result.dropped:
        print(f"note: {name} was left out of the configuration: these weights are not quantised")
    print(
        f"{result.path}: {result.architecture}, {result.parameters:,} parameters in {result.tensors:,} "
        f"tensors, {decimal(result.nbytes)}, {result.files} {'file' if result.files == 1 else 'files'}"
        f"{' (sparse: no data)' if sparse else ''}"
    )
