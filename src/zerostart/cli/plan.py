"""``zerostart plan``: what each rank would read and hold, from the headers alone."""

from __future__ import annotations

import json as json_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerostart.cli.options import (
    DtypeOption,
    EngineOption,
    ExchangeOption,
    ExpertParallelOption,
    SourceArgument,
    StageOption,
    TensorParallelOption,
    named_dtype,
)

if TYPE_CHECKING:
    from zerostart.forecast import WorldPlan

__all__ = ["command"]

#: Ranks that the table shows; a line sums up the rest.
SHOWN = 16


def command(
    source: SourceArgument,
    world_size: Annotated[
        int, typer.Option("--world-size", min=1, help="Number of ranks.", show_default=False)
    ],
    engine: EngineOption = "deepspeed",
    zero_stage: StageOption = 3,
    expert_parallel: ExpertParallelOption = 1,
    tensor_parallel: TensorParallelOption = 1,
    dtype: DtypeOption = None,
    exchange: ExchangeOption = None,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Plan this rank alone.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what every rank would read and hold; needs no accelerator and no other rank."""
    import zerostart

    chosen: Any = named_dtype(dtype)
    made = zerostart.plan(
        source,
        world_size=world_size,
        engine=engine,
        zero_stage=zero_stage,
        expert_parallel=expert_parallel,
        tensor_parallel=tensor_parallel,
        dtype=chosen,
        rank=rank,
        exchange=exchange,
    )
    if json:
        typer.echo(json_module.dumps(made.as_dict()))
    else:
        _show(made, source)


def _show(made: WorldPlan, source: str) -> None:
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    console = Console()
    console.print(
        f"{source}: {decimal(made.checkpoint_bytes)}, {made.parameters:,} elements, "
        f"largest tensor {decimal(made.largest_tensor_bytes)}; planned in {made.planning_seconds:.2f} s"
    )
    table = Table(title=f"{made.engine}, {made.world_size} ranks")
    for heading in ("rank", "reads", "in", "on device", "host peak", "share of the checkpoint"):
        table.add_column(heading, justify="left" if heading.startswith("share") else "right")
    for rank in made.ranks[:SHOWN]:
        share = rank.read_bytes / max(1, made.checkpoint_bytes)
        bar = "█" * round(24 * share) or "▏"
        table.add_row(
            str(rank.rank),
            decimal(rank.read_bytes),
            f"{rank.read_ops:,} ops",
            decimal(rank.device_bytes),
            decimal(rank.peak_host_bytes),
            f"{bar} {share:.1%}",
        )
    console.print(table)
    if len(made.ranks) > SHOWN:
        most = max(rank.read_bytes for rank in made.ranks)
        console.print(
            f"... and {len(made.ranks) - SHOWN} more ranks; the most that one reads is {decimal(most)}"
        )
    if made.sharing is not None:
        console.print(f"Reading: {made.sharing}")
    if made.exchanged_bytes:
        console.print(f"All ranks together get {decimal(sum(made.exchanged_bytes))} from others")
    if made.tier is not None:
        console.print(f"Whole parameters on every rank, {made.tier}")
    for kind, names in (
        ("missing", made.missing),
        ("unexpected", made.unexpected),
        ("computed from whole tensors", made.computed_whole),
    ):
        if names:
            console.print(f"{kind} ({len(names)}): {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}")
