"""What of the media a cache has already, and what is new to it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from zerostart.training.data.cached import CachedItems


@dataclass(frozen=True)
class Growth:
    """The rows that are wanted, by ``keys``, and for each the item of ``cached`` that it is; None: new.

    Where a part of the media is asked for alone, the other items of ``cached`` stay, after those ``asked``.
    """

    keys: Sequence[bytes]
    cached: CachedItems | None
    kept: tuple[int | None, ...]
    asked: int

    @classmethod
    def of(cls, keys: Sequence[bytes], cached: CachedItems | None, part: bool = False) -> Growth:
        """``cached`` says which rows its items are of. Of rows that are equal each has an item of its own.

        ``part``: the rows are not all that there are, so that nothing can be said to have gone.
        """
        there: dict[bytes, list[int]] = {}
        rows = (cached.rows if cached else None) or ()
        for item, key in reversed(list(enumerate(rows))):
            there.setdefault(key, []).append(item)
        kept = [there[key].pop() if there.get(key) else None for key in keys]
        others = sorted(item for items in there.values() for item in items) if part else []
        return cls([*keys, *(rows[item] for item in others)], cached, (*kept, *others), len(keys))

    @cached_property
    def new(self) -> list[int]:
        """The rows that are to be encoded."""
        return [row for row, item in enumerate(self.kept) if item is None]

    @property
    def is_none(self) -> bool:
        """Whether the cache has these rows, in this order, and no others."""
        there = tuple(range(len(self.cached))) if self.cached is not None else None
        return self.kept == there and self.asked == len(self.kept)

    @property
    def numbers(self) -> list[int]:
        """By which each new row is drawn: that of the row, unless an item that stays was drawn by it."""
        taken = {self.cached.entry(item).number for item in self.kept if item is not None and self.cached}
        free = itertools.count(max([len(self.kept), *(number + 1 for number in taken)]))
        return [next(free) if row in taken else row for row in self.new]
