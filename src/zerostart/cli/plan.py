"""``zerostart plan``: forecast reads and memory of each rank from file headers."""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from zerostart.checkpoint.strict_json import dump_json
from zerostart.cli.options import (
    FORECAST_OPTIONS,
    LOAD_OPTIONS,
    Download,
    SourceArgument,
    add_options,
    download_if,
    parse_values,
)


@add_options(*LOAD_OPTIONS, *FORECAST_OPTIONS)
def command(
    source: SourceArgument,
    world_size: Annotated[
        int, typer.Option("--world-size", metavar="N", min=1, help="Number of ranks.", show_default=False)
    ],
    must_fit: Annotated[
        bool, typer.Option("--must-fit", help="Exit with status 1 if it does not fit into the memory.")
    ] = False,
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="N", min=0, help="Plan only this rank.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    download: Download = False,
    html: Annotated[Path | None, typer.Option("--html", dir_okay=False, help="Write an HTML page.")] = None,
    **values: Any,
) -> None:
    """Forecast the reads and memory of each rank.

    Reads only file headers, and needs no accelerator, no other rank and no installed engine. Memory includes
    the load, the engine's construction and the first step, without activations.
    """
    import zerostart
    from zerostart.distributed.machine import no_garbage_collection

    download_if(source, download)
    # Skip garbage collection, also at exit: this process only plans.
    atexit.register(gc.freeze)
    # Other libraries print to stdout, which belongs to this command.
    with no_garbage_collection(), contextlib.redirect_stdout(sys.stderr):
        world_plan = zerostart.plan(source, world_size, rank=rank, **parse_values(values))
    if html is not None:
        from zerostart.errors import WriteError
        from zerostart.loading.forecast.page import page_of

        try:
            html.write_text(page_of(world_plan, source), encoding="utf-8")
        except OSError as error:
            raise WriteError(f"{html}: the page cannot be written: {error.strerror}") from error
    if json:
        typer.echo(dump_json(world_plan.as_dict()))
    else:
        from zerostart.cli.memory_view import show_plan

        show_plan(world_plan, source)
    # None means that no limit is known.
    if must_fit and world_plan.fit is False:
        raise typer.Exit(1)
