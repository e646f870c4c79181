"""Options that several commands share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = [
    "DtypeOption",
    "EngineConfigOption",
    "EngineOption",
    "ExchangeOption",
    "ExpertParallelOption",
    "MemoryLimitOption",
    "SourceArgument",
    "StageOption",
    "TensorParallelOption",
    "engine_config_of",
    "named_dtype",
    "size_of",
]

SourceArgument = Annotated[
    str,
    typer.Argument(help="A checkpoint: directory, file, or hub id in the local cache.", show_default=False),
]
EngineOption = Annotated[str, typer.Option("--engine", help="deepspeed or fsdp2.")]
StageOption = Annotated[
    int, typer.Option("--zero-stage", min=0, max=3, help="ZeRO stage; 0: whole on every rank.")
]
ExpertParallelOption = Annotated[
    int, typer.Option("--expert-parallel", min=1, help="Ranks that share experts.")
]
TensorParallelOption = Annotated[
    int, typer.Option("--tensor-parallel", min=1, help="Ranks that share a tensor.")
]
DtypeOption = Annotated[
    str | None,
    typer.Option("--dtype", help="Floating dtype, such as bfloat16; default: the checkpoint's own."),
]
ExchangeOption = Annotated[
    bool | None,
    typer.Option(
        "--exchange/--no-exchange",
        help="Read what several ranks want once and exchange it, or on each; default: what is faster.",
        show_default=False,
    ),
]
EngineConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--engine-config",
        help="A JSON file: DeepSpeed's configuration, or what is set for fsdp2.",
        exists=True,
        dir_okay=False,
        show_default=False,
    ),
]
MemoryLimitOption = Annotated[
    str | None,
    typer.Option(
        "--memory-limit", metavar="SIZE", help="Most staging buffers of a rank.", show_default=False
    ),
]


def engine_config_of(path: Path | None) -> dict[str, Any] | None:
    """The configuration in a JSON file (None for None); raises ConfigError for anything but an object."""
    from zerostart.errors import ConfigError

    if path is None:
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a {type(config).__name__}; a configuration is an object")
    return config


def size_of(value: str | None, a_second: bool = False) -> int | None:
    """Bytes in "80GB" or "40GiB" (None for None), ``a_second`` also "7GB/s"; raises a usage error."""
    from zerostart.checkpoint.shards import parse_size
    from zerostart.errors import ConfigError

    if value is None:
        return None
    try:
        return parse_size(value.removesuffix("/s") if a_second else value)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error


def named_dtype(name: str | None) -> object:
    """The torch dtype of that name (None for None); raises ConfigError for any other word."""
    import torch

    from zerostart.errors import ConfigError

    if name is None:
        return None
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"--dtype {name} is not a torch dtype; try float32, bfloat16 or float16")
    return dtype
