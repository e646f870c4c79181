"""``zerostart plan``: what each rank would read and hold, from the headers alone."""

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
    fetched,
    takes,
    values_of,
)


@takes(*LOAD_OPTIONS, *FORECAST_OPTIONS)
def command(
    source: SourceArgument,
    world_size: Annotated[
        int, typer.Option("--world-size", metavar="N", min=1, help="Number of ranks.", show_default=False)
    ],
    must_fit: Annotated[
        bool, typer.Option("--must-fit", help="Exit with status 1 if it does not fit into the memory.")
    ] = False,
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="N", min=0, help="Plan this rank alone.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    download: Download = False,
    html: Annotated[
        Path | None, typer.Option("--html", dir_okay=False, help="Write a page to look at, one file.")
    ] = None,
    **given: Any,
) -> None:
    """Tell what each rank would read and hold, and whether it fits.

    Needs the headers of the files alone: no accelerator, no other rank, and no engine that is installed.
    Memory is told through the load, the engine's construction and the first step, without activations.
    """
    import zerostart
    from zerostart.loading.preparation import no_garbage_collection

    fetched(source, download)
    # A process that plans and ends: nothing in it is worth collecting, not even on its way out.
    atexit.register(gc.freeze)
    # What other libraries print while they are asked is no part of what this command prints.
    with no_garbage_collection(), contextlib.redirect_stdout(sys.stderr):
        made = zerostart.plan(source, world_size, rank=rank, **values_of(given))
    if html is not None:
        from zerostart.errors import WriteError
        from zerostart.loading.forecast.page import page_of

        try:
            html.write_text(page_of(made, source), encoding="utf-8")
        except OSError as error:
            raise WriteError(f"{html}: the page cannot be written: {error.strerror}") from error
    if json:
        typer.echo(dump_json(made.as_dict()))
    else:
        from zerostart.cli.memory_view import show_plan

        show_plan(made, source)
    # Not where it is None: then no limit is known that it could exceed.
    if must_fit and made.fit is False:
        raise typer.Exit(1)
