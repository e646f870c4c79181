"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = [
    "DtypeOption",
    "EngineOption",
    "ExchangeOption",
    "ExpertParallelOption",
    "SourceArgument",
    "StageOption",
    "TensorParallelOption",
    "named_dtype",
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
