"""``zerostart plan``: what each rank would read and hold, from the headers alone."""

from __future__ import annotations

import atexit
import gc
from typing import Annotated, Any

import typer

from zerostart.checkpoint.strict_json import dump_json
from zerostart.cli.options import (
    DtypeOption,
    EngineConfigOption,
    EngineOption,
    ExchangeOption,
    ExpertParallelOption,
    MemoryLimitOption,
    SourceArgument,
    StageOption,
    TensorParallelOption,
    engine_config_of,
    named_dtype,
    size_of,
)
from zerostart.loading.collection import uncollected

__all__ = ["command"]


def command(
    source: SourceArgument,
    world_size: Annotated[
        int, typer.Option("--world-size", min=1, help="Number of ranks.", show_default=False)
    ],
    engine: EngineOption = "deepspeed",
    zero_stage: StageOption = 3,
    engine_config: EngineConfigOption = None,
    expert_parallel: ExpertParallelOption = 1,
    tensor_parallel: TensorParallelOption = 1,
    dtype: DtypeOption = None,
    exchange: ExchangeOption = None,
    memory_limit: MemoryLimitOption = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            "--optimizer",
            help="adamw, fused_adamw, adam, momentum or sgd; default: as configured, else adamw.",
            show_default=False,
        ),
    ] = None,
    device_memory: Annotated[
        str | None,
        typer.Option(
            "--device-memory",
            metavar="SIZE",
            help="Memory of one accelerator, such as 80GB; plans for accelerators also where there is none.",
            show_default=False,
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            "--host-memory",
            metavar="SIZE",
            help="Memory of one machine, which up to 8 ranks share.",
            show_default=False,
        ),
    ] = None,
    storage_rate: Annotated[
        str | None,
        typer.Option(
            "--storage-rate",
            metavar="RATE",
            help="What storage gives to one machine, such as 7GB/s.",
            show_default=False,
        ),
    ] = None,
    interconnect_rate: Annotated[
        str | None,
        typer.Option(
            "--interconnect-rate",
            metavar="RATE",
            help="What one rank exchanges with others, such as 200GB/s.",
            show_default=False,
        ),
    ] = None,
    must_fit: Annotated[
        bool, typer.Option("--must-fit", help="Exit with status 1 if it does not fit into the memory.")
    ] = False,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Plan this rank alone.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what every rank would read and hold, and whether it fits; needs no accelerator and no other rank.

    Memory is told through the load, the engine's construction and the first step, without activations.
    """
    import zerostart

    # A process that plans and ends: nothing in it is worth collecting, not even on its way out.
    atexit.register(gc.freeze)
    with uncollected():
        chosen: Any = named_dtype(dtype)
        made = zerostart.plan(
            source,
            world_size=world_size,
            engine=engine,
            zero_stage=zero_stage,
            engine_config=engine_config_of(engine_config),
            expert_parallel=expert_parallel,
            tensor_parallel=tensor_parallel,
            dtype=chosen,
            rank=rank,
            exchange=exchange,
            memory_limit=size_of(memory_limit),
            optimizer=optimizer,
            device_memory=size_of(device_memory),
            host_memory=size_of(host_memory),
            storage_rate=size_of(storage_rate, a_second=True),
            interconnect_rate=size_of(interconnect_rate, a_second=True),
        )
    if json:
        typer.echo(dump_json(made.as_dict()))
    else:
        from zerostart.cli.memory_view import show_plan

        show_plan(made, source)
    if must_fit and made.fit is False:
        raise typer.Exit(1)
