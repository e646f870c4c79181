"""``zerostart train``: run a training configuration.

Its local ranks run ``python -m zerostart.cli.train CONFIG [KEY=VALUE ...]``.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from zerostart.cli.launch import join_group, leave_group, run_local_ranks, worker_main
from zerostart.cli.options import Download, download_if
from zerostart.errors import ConfigError

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="The configuration, a YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values that override the file.")
]
Ranks = Annotated[
    int | None, typer.Option("--nproc", metavar="N", min=1, help="Start this many ranks on this machine.")
]


def command(
    config: Config, overrides: Overrides = None, nproc: Ranks = None, download: Download = False
) -> None:
    """Load a model in shards, train it, and save it.

    Under torchrun or accelerate launch it joins their ranks; otherwise it starts --nproc ranks (default 1).
    The first Ctrl-C ends the run after the current step and saves the model.
    """
    run_config("zerostart.cli.train", [str(config), *(overrides or [])], nproc, _run, download)


def run_config(
    module: str,
    arguments: list[str],
    nproc: int | None,
    run: Callable[[list[str]], object],
    download: bool = False,
) -> None:
    """Call ``run(arguments)``, with a configuration and its overrides, on every rank.

    Runs in the ranks of a launcher, or starts ``nproc`` (1) local ranks with the main of ``module``.
    ``download``: fetch a model that is missing. Raises ConfigError for a wrong configuration, and the errors
    of the ranks.
    """
    from zerostart.training.config.load import load_config

    config = load_config(arguments[0], arguments[1:])  # report mistakes once, before ranks start
    download_if(config.model.source, download)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if nproc is not None:
            raise ConfigError(
                "--nproc starts ranks, but a launcher has already started them (RANK is set); leave out "
                "--nproc"
            )
        run(arguments)
    else:
        run_local_ranks(module, arguments, nproc or 1)


def _run(arguments: list[str]) -> dict[str, Any]:
    """Train on one rank; return the :class:`TrainResult` as plain data."""
    from zerostart.training.config.load import load_config
    from zerostart.training.loop.runner import train

    config = load_config(arguments[0], arguments[1:])
    join_group()
    result = dataclasses.asdict(train(config))
    leave_group()
    return result


if __name__ == "__main__":
    worker_main(_run)
