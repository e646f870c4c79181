"""Media that are the same on every rank, and going over them several times an epoch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from zerostart.distributed.world import World
from zerostart.errors import ConfigError
from zerostart.training.media.config import MediaConfig
from zerostart.training.media.items import MediaItems

__all__ = ["Repeated", "read_media"]


def read_media(config: MediaConfig, world: World) -> MediaItems:
    """The media that ``config`` names, of which every file is there; collective.

    Raises :class:`ConfigError` on every rank, with the same text, where a rank cannot read them, or has others.
    """
    with world.phase("reading the table of media"):
        items = MediaItems(config)
        mine = (len(items), items.digest())
    ranks = world.all_gather_object(mine, "comparing the media")
    if len(set(ranks)) == 1:
        return items
    rows = world.all_gather_object(b"".join(items.row_digests), "looking for the rows that differ")
    other = next(rank for rank, told in enumerate(ranks) if told != ranks[0])
    if rows[other] == rows[0]:
        raise ConfigError(
            f"the ranks are configured differently: rank {other} decodes the media otherwise than rank 0; start "
            "all of them with the same configuration"
        )
    fewer = min(ranks[0][0], ranks[other][0])
    first = next((i for i in range(fewer) if rows[0][16 * i :][:16] != rows[other][16 * i :][:16]), fewer)
    longer = 0 if ranks[0][0] > first else other
    where = world.broadcast_object(lambda: items.where(first), "naming the row that differs", source=longer)
    raise ConfigError(
        f"the media differ between the ranks: rank {other} ({ranks[other][0]:,} rows) from rank 0 "
        f"({ranks[0][0]:,} rows), first in {where} as rank {longer} reads it. Every rank reads media.source for "
        "itself: copy the same files to every machine, or name a directory they share"
    )


class Items(Protocol):
    """Examples that can be had by their number."""

    def __len__(self) -> int:
        """How many there are."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Example ``index``."""

    def digest(self) -> str:
        """Equal for equal examples."""

    def shapes(self) -> Sequence[Hashable]:
        """A key for each; those with the same key can be in one batch."""


class Repeated:
    """``items`` gone over ``times`` times: example ``i`` is ``items[i % len(items)]``."""

    def __init__(self, items: Items, times: int) -> None:
        self._items = items
        self._times = times

    def __len__(self) -> int:
        return len(self._items) * self._times

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._items[index % len(self._items)]

    def digest(self) -> str:
        """That of the items, and how often they come."""
        return f"{self._items.digest()}*{self._times}"

    def shapes(self) -> Sequence[Hashable]:
        """Those of the items, as often."""
        return list(self._items.shapes()) * self._times
