"""``zerostart cache``: encode the media of a configuration once.

Its ranks run ``python -m zerostart.cli.cache CONFIG [KEY=VALUE ...]``.
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
    """Encode the media of a run once, for later runs.

    All ranks compute latents and embeddings; zerostart train then opens no file of an encoder. A killed run
    continues where it stopped. An existing cache is compared with the configuration.
    """
    run_config("zerostart.cli.cache", [str(config), *(overrides or [])], nproc, _run, download)


def _run(arguments: list[str]) -> dict[str, Any]:
    """Encode one rank's part; return the directory and digest of the cache."""
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
