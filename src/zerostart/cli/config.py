"""``zerostart config``: write an initial training configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zerostart.errors import ConfigError, WriteError


def command(
    family: Annotated[
        str,
        typer.Argument(
            metavar="FAMILY",
            help="wan, qwen-image, flux, flux2, z-image, hunyuan-video or ltx2.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The YAML file to write.")],
    engine: Annotated[
        str | None,
        typer.Option("--engine", help="deepspeed or fsdp2; default: the launcher's, else what is installed."),
    ] = None,
    zero_stage: Annotated[
        int,
        typer.Option(
            "--zero-stage", metavar="N", min=0, max=3, help="3 shards parameters, 0 to 2 leave them whole."
        ),
    ] = 3,
    lora: Annotated[bool, typer.Option("--lora", help="Train low-rank adapters.")] = False,
) -> None:
    """Write an initial training configuration.

    It has a comment at each key that users change. Name the model and the data in it. An existing file is
    not overwritten.
    """
    from zerostart.engines import Mesh, check_choice, choose_engine
    from zerostart.training.config.templates import render_template

    kind = check_choice(engine or choose_engine().name, zero_stage)
    chosen = kind.for_stage(zero_stage, None, Mesh(1), None)
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out} already exists; choose another name, or remove it")
    try:
        # "x", in case another process has created it meanwhile.
        with out.open("x", encoding="utf-8") as file:
            file.write(render_template(family, chosen, lora))
    except OSError as error:
        raise WriteError(f"{out} cannot be written: {error.strerror}") from error
    typer.echo(f"wrote {out}")
