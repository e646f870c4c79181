"""What a cache is made of, in what that differs from what is asked for now, and which rows are new to it."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from zerostart.training.config.configuration import CacheConfig
from zerostart.training.data.cached import CachedItems

if TYPE_CHECKING:
    from zerostart.training.data.items import MediaItems

#: The settings on which the numbers in a cache depend.
_SETTINGS = ("dtype", "vae_dtype", "max_sequence_length", "posterior", "seed", "last_frame")
_SHOWN = 3


@dataclass(frozen=True)
class Facts:
    """What a cache is made of: data, files of the encoders by name, and settings. None: not known here."""

    data: Mapping[str, Any] | None
    encoders: Mapping[str, Any] | None
    settings: CacheConfig

    def document(self) -> dict[str, object]:
        """As JSON."""
        chosen = self.settings.model_dump(mode="json", include=set(_SETTINGS))
        if self.settings.posterior == "mode":
            chosen["seed"] = None  # nothing is drawn
        return {"data": self.data, "encoders": self.encoders, "settings": chosen}


def facts_of_media(media: MediaItems) -> dict[str, object]:
    """How many items there are, and a digest of them and of how they are decoded.

    Of several data sets, and of one with orders of its tags, also the items and the orders of each.
    """
    sets = [[len(one), one.config.orders] for one in media.sets]
    # Left out for one plain data set, so that caches from before several could be named still compare equal.
    told = {} if sets == [[len(media), 1]] else {"sets": sets}
    return {"items": len(media), "digest": media.digest(), **told}


def facts_of_rows(keys: Sequence[bytes]) -> dict[str, object]:
    """The same of some rows alone."""
    return {"items": len(keys), "digest": hashlib.blake2b(b"".join(keys), digest_size=16).hexdigest()}


def differences(made: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In words, in what ``now`` is not what a cache was made of; what is not known now is not compared."""
    found = []
    if now["data"] is not None and now["data"] != made["data"]:
        before, after = made["data"]["items"], now["data"]["items"]
        counts = (
            f"{before} items then, {after} now"
            if before != after
            else f"{after} items, of other contents or sizes"
        )
        found.append(f"it was made from other data than media gives ({counts})")
    if now["encoders"] is not None:
        found += _of_encoders(made["encoders"], now["encoders"])
    for key, value in now["settings"].items():
        before = made["settings"].get(key)
        if before != value:
            found.append(f"cache.{key} was {before} and is {value}")
    return found


def _of_encoders(made: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    if made["class"] != now["class"]:
        return [f"it was made by a {made['class']}, and the pipeline is a {now['class']}"]
    found = [
        f"{key} of the pipeline was {made['settings'].get(key)} and is {now['settings'].get(key)}"
        for key in sorted({*made.get("settings", ()), *now["settings"]})
        # An older cache does not say the pipeline's settings: they are not compared then.
        if "settings" in made and made["settings"].get(key) != now["settings"].get(key)
    ]
    # Folders of encoders that are here at all: one that is absent as a whole is taken as it was.
    folders = {name.partition("/")[0] for name in now["files"]}
    for name, (size, digest) in made["files"].items():
        if name not in now["files"]:
            if name.partition("/")[0] in folders:  # a cache does without encoders that are not there
                found.append(f"{name} is not there any more")
            continue
        size_now, digest_now = now["files"][name]
        if size != size_now:
            found.append(f"{name} had {size} bytes and has {size_now}")
        elif digest != digest_now:
            found.append(f"{name} has other contents")
    found += [f"{name} is new" for name in now["files"] if name not in made["files"]]
    more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return [f"it was made with other encoders ({', '.join(found[:_SHOWN])}{more})"] if found else []


@dataclass(frozen=True)
class CacheUpdate:
    """Rows of the media by their ``keys``, and for each the item of ``cached`` that it is; None: it is new.

    Where a part of the media is asked for alone, the first ``requested`` rows are these, and the others the
    items of ``cached`` beside them, which stay.
    """

    keys: Sequence[bytes]
    cached: CachedItems | None
    items: tuple[int | None, ...]
    requested: int

    @classmethod
    def of(cls, keys: Sequence[bytes], cached: CachedItems | None, part: bool = False) -> CacheUpdate:
        """``cached`` says which rows its items are of. Of rows that are equal each has an item of its own.

        ``part``: the rows are not all that there are, so that nothing can be said to have gone.
        """
        unused: dict[bytes, list[int]] = {}
        rows = (cached.rows if cached else None) or ()
        for item, key in reversed(list(enumerate(rows))):  # so that pop() gives the first of equal ones
            unused.setdefault(key, []).append(item)
        items = [unused[key].pop() if unused.get(key) else None for key in keys]
        # What the cache has beside the part, in its own order: `unused` lists it by the keys of rows.
        others = sorted(item for left in unused.values() for item in left) if part else []
        return cls([*keys, *(rows[item] for item in others)], cached, (*items, *others), len(keys))

    @cached_property
    def new_rows(self) -> list[int]:
        """The rows that are to be encoded."""
        return [row for row, item in enumerate(self.items) if item is None]

    @property
    def is_empty(self) -> bool:
        """Whether the cache has these rows, in this order, and no others."""
        # Also a change of order is a change: example `i` is to be row `i`.
        there = tuple(range(len(self.cached))) if self.cached is not None else None
        return self.items == there and self.requested == len(self.items)

    @property
    def draw_numbers(self) -> list[int]:
        """The number by which each new row is drawn: the row's, unless an item that stays was drawn by it."""
        # Two items must not share a number, or they would be drawn alike. A row keeps its own where it can,
        # so that a cache made in one go and one that has grown agree for most rows.
        used = {self.cached.entry(item).number for item in self.items if item is not None and self.cached}
        free = itertools.count(max([len(self.items), *(number + 1 for number in used)]))
        return [next(free) if row in used else row for row in self.new_rows]
