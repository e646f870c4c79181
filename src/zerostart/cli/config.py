"""``zerostart config``: write a training configuration to begin with, and the files of launchers."""

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
    accelerate: Annotated[
        bool,
        typer.Option("--accelerate", help="Write a file for accelerate launch, too: OUT.accelerate.yaml."),
    ] = False,
) -> None:
    """Write a training configuration to begin with.

    It has a comment at each key that users change. Nothing is overwritten. What is left to do is to
    name the model and the data.
    """
    from zerostart.engines import Mesh, check_choice, default_engine
    from zerostart.training.config.templates import described

    chosen = check_choice(engine or default_engine(), zero_stage).for_stage(zero_stage, None, Mesh(1), None)
    files = {out: described(family, chosen, lora)}
    if accelerate:
        launcher = {"distributed_type": "MULTI_GPU", "num_machines": 1, "num_processes": 8}
        files[out.with_suffix(".accelerate.yaml")] = _yaml(launcher)
    _write(files)


def _yaml(values: dict[str, object]) -> str:
    import yaml

    text: str = yaml.safe_dump(values, sort_keys=False)
    return text


def _write(files: dict[Path, str]) -> None:
    there = [str(path) for path in files if path.exists() or path.is_symlink()]
    if there:
        raise ConfigError(f"{', '.join(there)} already exist; choose another name, or remove them")
    for path, text in files.items():
        try:
            # "x", should somebody else have made it since the look above.
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise WriteError(f"{path} cannot be written: {error.strerror}") from error
        typer.echo(f"wrote {path}")
