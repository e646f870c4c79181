"""``zerostart kept``: the models that are kept in this machine's memory."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from zerostart.errors import ConfigError


def command(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="That one alone.")] = "",
    drop: Annotated[bool, typer.Option("--drop", help="Remove it from this machine's memory.")] = False,
) -> None:
    """List or drop the models that are kept in this machine's memory."""
    from rich.filesize import decimal

    from zerostart.checkpoint.kept import folder as kept

    if drop and not name:
        raise typer.BadParameter("name the model that is to be dropped")
    if name and not kept.is_own(kept.folder_of(name)):
        raise ConfigError(f"no model is kept under the name {name} in the memory of this machine")
    if drop:
        kept.remove(kept.folder_of(name))
        print(f"dropped {name}")
        return
    folders = [kept.folder_of(name)] if name else [*kept.kept_folders()]
    for folder in folders:
        newest = next(iter(kept.versions(folder)), None)
        expires = kept.terms_of(folder).get("expires_at", 0.0)
        print(
            f"{folder.name.removeprefix(kept.folder_of('x').name[:-1])}: "
            f"{'no version' if newest is None else f'version {newest.number}'}, "
            f"{decimal(kept.used_bytes(folder))}, ends in {max(0.0, expires - time.time()):.0f} s"
        )
    if not folders:
        print("no model is kept in the memory of this machine")
