"""``zerostart train``: run a configuration, on local ranks or in those that a launcher has started.

Also the worker of its own local ranks: ``python -m zerostart.cli.train CONFIG [KEY=VALUE ...]``.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from zerostart.cli.launch import join_group, leave_group, run_local_ranks, worker_main
from zerostart.cli.options import Download, fetched
from zerostart.errors import ConfigError

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="The configuration, a YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values over those of the file.")
]
Ranks = Annotated[
    int | None, typer.Option("--nproc", metavar="N", min=1, help="Start this many ranks on this machine.")
]


def command(
    config: Config, overrides: Overrides = None, nproc: Ranks = None, download: Download = False
) -> None:
    """Load a model in shards, train it, and save it.

    Under torchrun or accelerate launch it joins their ranks; elsewhere it starts --nproc of its own
    (default 1). The first Ctrl-C ends the run after the step in hand and saves the model.
    """
    run_config("zerostart.cli.train", [str(config), *(overrides or [])], nproc, _run, download)


def run_config(
    module: str,
    arguments: list[str],
    nproc: int | None,
    run: Callable[[list[str]], object],
    download: bool = False,
) -> None:
    """Call ``run(arguments)`` (a configuration, and what is set over it) in every rank.

    These are the ranks that a launcher has started, or ``nproc`` (1) of our own, whose main is ``module``.
    ``download``: fetch its model first, where that is not there.
    Raises ConfigError for a configuration that is wrong, and what the ranks raise.
    """
    from zerostart.training.config.load import load_config

    config = load_config(arguments[0], arguments[1:])  # a mistake in it is told at once, and once
    fetched(config.model.source, download)
    # A launcher's rank runs here; our own ranks run ``module``, each with the same words.
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if nproc is not None:
            raise ConfigError(
                "--nproc starts ranks, but a launcher has started them already (RANK is set); leave out "
                "--nproc"
            )
        run(arguments)
    else:
        run_local_ranks(module, arguments, nproc or 1)


def _run(arguments: list[str]) -> dict[str, Any]:
    """One rank's whole run; returns the :class:`TrainResult` as plain data."""
    from zerostart.training.config.load import load_config
    from zerostart.training.loop.runner import train

    config = load_config(arguments[0], arguments[1:])
    join_group()
    result = dataclasses.asdict(train(config))
    leave_group()
    return result


if __name__ == "__main__":
    worker_main(_run)
