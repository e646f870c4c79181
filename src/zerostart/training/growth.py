"""What of the media a cache has already, and what is new to it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from zerostart.training.cached import CachedItems

__all__ = ["Growth"]


@dataclass(frozen=True)
class Growth:
    """The rows that are wanted, by ``keys``, and for each the item of ``cached`` that it is; None: new."""

    keys: Sequence[bytes]
    cached: CachedItems | None
    kept: tuple[int | None, ...]

    @classmethod
    def of(cls, keys: Sequence[bytes], cached: CachedItems | None) -> Growth:
        """``cached`` says which rows its items are of. Of rows that are equal each has an item of its own."""
        there: dict[bytes, list[int]] = {}
        for item, key in reversed(list(enumerate((cached.rows if cached else None) or ()))):
            there.setdefault(key, []).append(item)
        return cls(keys, cached, tuple(there[key].pop() if there.get(key) else None for key in keys))

    @cached_property
    def new(self) -> list[int]:
        """The rows that are to be encoded."""
        return [row for row, item in enumerate(self.kept) if item is None]

    @property
    def is_none(self) -> bool:
        """Whether the cache has these rows, in this order, and no others."""
        return self.cached is not None and self.kept == tuple(range(len(self.cached)))

    @property
    def numbers(self) -> list[int]:
        """By which each new row is drawn: that of the row, unless an item that stays was drawn by it."""
        taken = {self.cached.entry(item).number for item in self.kept if item is not None and self.cached}
        free = itertools.count(max([len(self.kept), *(number + 1 for number in taken)]))
        return [next(free) if row in taken else row for row in self.new]
