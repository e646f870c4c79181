"""``zerostart cache``: encode the media of a configuration once, for the runs that train on them.

Also the worker of its own local ranks: ``python -m zerostart.cli.cache CONFIG [KEY=VALUE ...]``.
"""

from __future__ import annotations

from typing import Any

import typer

from zerostart.cli.launch import join_group, leave_group, worker_main
from zerostart.cli.options import Download
from zerostart.cli.train import Config, Overrides, Ranks, run_config
from zerostart.errors import ConfigError


def command(
    config: Config, overrides: Overrides = None, nproc: Ranks = None, download: Download = False
) -> None:
    """Encode the media of a run once, and keep what comes out.

    Latents and embeddings are computed on all ranks. zerostart train then opens no file of an encoder.
    A run that was killed continues where it stopped; a
    cache that is there already is compared with what is asked for.
    """
    run_config("zerostart.cli.cache", [str(config), *(overrides or [])], nproc, _run, download)


def _run(arguments: list[str]) -> dict[str, Any]:
    """One rank's part; returns where the cache is, and of how many items."""
    from zerostart.distributed.world import current_world
    from zerostart.training.config.load import load_config
    from zerostart.training.data.cache import ensure_cache
    from zerostart.training.loop.task import task_class

    config = load_config(arguments[0], arguments[1:])
    if "cache" not in task_class(config.task.name).sections:
        raise ConfigError(
            f"task.name {config.task.name} does not train on encoded media, so there is nothing to cache"
        )
    join_group()
    world = current_world()
    items = ensure_cache(config, world)
    if world.rank == 0:
        typer.echo(f"{len(items)} items in {items.directory}")
    leave_group()
    return {"directory": str(items.directory), "items": len(items), "digest": items.digest()}


if __name__ == "__main__":
    worker_main(_run)
