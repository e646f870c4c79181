"""Decoded examples, the input of a task's encoders.

An item is what one row of the table gives::

    {
        "prompt": str,                      # "" where the row or the table has none
        "image": uint8 [3, H, W],           # kind image
        "video": uint8 [3, F, H, W],        # kind video; a picture in such a column is a video of one frame
        "edit_image": [uint8 [3, h, w]],    # kind images: a list, empty where the cell is
        "seed": "12", ...                   # other columns, as the table has them, unless called as one above
    }

with red, green and blue of 0 to 255 on the CPU. A column of kind image or video whose cell is empty is
absent from the item. :func:`read_media` is the entry: collective, and the same on every rank when it returns.
"""

from __future__ import annotations

import bisect
import hashlib
import logging
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from torch.utils.data import ConcatDataset, Dataset

from zerostart.distributed.world import World
from zerostart.errors import ConfigError
from zerostart.training.data.media import ColumnMedia, MediaFile, media_of_row
from zerostart.training.data.media_config import KNOWN_COLUMNS, Column, DatasetConfig, MediaConfig
from zerostart.training.data.table import files_of, media_columns, read_table, text_column

T = TypeVar("T")

#: Key of an example's frames a second, where its data set sets them.
FRAME_RATE = "media.frame_rate"
_THREADS = 16  # that look at files, which may be on a network
_SHOWN = 3  # bad rows that an error names
#: Keys that say where the data are, or how an epoch goes over them, not what is in an item.
_NOT_CONTENT = {"source", "base", "split", "items", "repeats", "workers", "datasets", "caption_prefix"}

logger = logging.getLogger("zerostart")


class MediaSet(Dataset[dict[str, Any]]):
    """The rows of one data set."""

    def __init__(self, config: DatasetConfig) -> None:
        """Read the table; raises ConfigError where it is absent, malformed, or lacks a column."""
        self.config = config
        self._table = read_table(config)
        self._text = text_column(config, self._table.columns)
        self.columns = media_columns(config, self._table)
        self.note = self._table.note
        self.settings = repr(sorted(config.model_dump(exclude=_NOT_CONTENT).items()))

    def __len__(self) -> int:
        return len(self._table.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Decode an item; raises ConfigError, naming row and file, for what cannot be decoded."""
        item = self._other_cells(index)
        for name, part in self._media(index).items():
            item[name] = self._in_column(index, name, part.tensors)
        return item

    def where(self, index: int) -> str:
        """Return the place of the row of item ``index``, for messages."""
        return self._table.where(index)

    def shapes(self) -> list[Hashable]:
        """Return a key for each item. Raises ConfigError, naming row and file."""
        return self._for_each(self._shape)

    def _shape(self, index: int) -> Hashable:
        return tuple((name, part.shape) for name, part in self._media(index).items())

    def digests(self) -> list[tuple[bytes, bytes]]:
        """Return two digests of each item: without and with the names and times of its files.

        Raises ConfigError that names rows with absent files.
        """
        return self._for_each(self._digests)

    def _digests(self, index: int) -> tuple[bytes, bytes]:
        # Sorted by column: the order of columns in the table is no content. The settings are each set's own:
        # the same file in another size is another item.
        cells = repr(sorted(self._other_cells(index).items()))
        hashed = hashlib.blake2b(f"{self.settings} {cells}".encode("utf-8", "surrogatepass"), digest_size=16)
        states, names = [], []
        for name, files in self._files(index).items():
            found = [self._in_column(index, name, file.state) for file in files]
            sizes = [one if isinstance(one, str) else [size for size, _ in one] for one in found]
            hashed.update(f"{name} {sizes}".encode())
            states.append(found)
            names.append([self._relative(file) for file in files])
        without = hashed.digest()
        hashed.update(f"{names} {states}".encode("utf-8", "surrogatepass"))
        return without, hashed.digest()

    def _relative(self, file: MediaFile) -> str:
        if file.path is None:
            return ""
        base = self._table.base
        # A table that has moved together with its files is recognised.
        return str(file.path.relative_to(base)) if file.path.is_relative_to(base) else file.name

    def _for_each(self, function: Callable[[int], T]) -> list[T]:
        with ThreadPoolExecutor(_THREADS) as threads:
            found = list(threads.map(partial(_outcome, function), range(len(self))))
        failures = [str(outcome) for outcome in found if isinstance(outcome, ConfigError)]
        if failures:
            more = f"; and {len(failures) - _SHOWN} more rows" if len(failures) > _SHOWN else ""
            raise ConfigError("; ".join(failures[:_SHOWN]) + more)
        return [outcome for outcome in found if not isinstance(outcome, ConfigError)]

    def _in_column(self, index: int, name: str, act: Callable[[], T]) -> T:
        """Call ``act``; its error begins with the row and the column."""
        try:
            return act()
        except (ConfigError, OSError) as error:
            raise ConfigError(f"{self._place(index, name)}: {error}") from error

    def _place(self, index: int, name: str) -> str:
        column = next(column.column for column in self.columns if column.name == name)
        return f"{self.where(index)}, column {column!r}"

    def _other_cells(self, index: int) -> dict[str, object]:
        """Return the text, and the cells that name no files."""
        row, prompt = self._table.rows[index], self._text
        taken = {column.column for column in self.columns} | {prompt}
        # Encoders find pictures and videos by their names, so no other cell may have one of these.
        cells = {name: v for name, v in row.items() if name not in taken and name not in KNOWN_COLUMNS}
        if prompt is not None and prompt not in row:
            raise ConfigError(
                f"{self.where(index)}: no {prompt!r}; write an empty text for a row without one"
            )
        text = "" if prompt is None else row[prompt]
        if text is not None and not isinstance(text, str):
            raise ConfigError(f"{self.where(index)}, column {prompt!r}: {text!r} is not a text")
        return {**cells, "prompt": self.config.caption_prefix + (text or "")}

    def _files(self, index: int) -> dict[str, tuple[MediaFile, ...]]:
        row, base = self._table.rows[index], self._table.base
        return {
            column.name: files_of(row.get(column.column), column.kind, base, self._place(index, column.name))
            for column in self.columns
        }

    def _media(self, index: int) -> dict[str, ColumnMedia]:
        files = self._files(index)

        def in_column(column: Column, act: Callable[[], T]) -> T:
            return self._in_column(index, column.name, act)

        if not any(files.values()):
            names = ", ".join(column.column for column in self.columns)
            raise ConfigError(f"{self.where(index)}: its cells under {names} are all empty; remove the row")
        return media_of_row(self.columns, files, self.config, in_column)


def _outcome(function: Callable[[int], T], row: int) -> T | ConfigError:
    try:
        return function(row)
    except ConfigError as error:
        return error


class MediaItems(ConcatDataset[dict[str, Any]]):
    """The items of all data sets, one set after the other, each decoded when it is asked for."""

    def __init__(self, config: MediaConfig) -> None:
        """Read the tables; raises ConfigError where one is absent, malformed, or lacks a column."""
        self.config = config
        self.sets = [MediaSet(one) for one in config.sets]
        super().__init__(self.sets)

    def _at(self, index: int) -> tuple[MediaSet, int]:
        """Return the set of an item, and its place there."""
        number = bisect.bisect_right(self.cumulative_sizes, index)
        return self.sets[number], index - (self.cumulative_sizes[number - 1] if number else 0)

    def where(self, index: int) -> str:
        """Return the place of the row of item ``index``, for messages."""
        found, place = self._at(index)
        return found.where(place)

    def frame_rate(self, index: int) -> float | None:
        """Return the frames a second of item ``index``, where its data set sets them."""
        return self._at(index)[0].config.frame_rate

    def shapes(self) -> list[Hashable]:
        """Return a key for each item, by headers only: equal ones mean tensors of the same shapes.

        Raises ConfigError, naming row and file.
        """
        return [key for one in self.sets for key in one.shapes()]

    def digests(self, times: bool) -> list[bytes]:
        """Return 16 bytes for each item's settings, cells and sizes of files, with ``times`` and names, too.

        Raises ConfigError that names the rows whose files are absent.
        """
        return [found[times] for one in self.sets for found in one.digests()]

    def digest(self) -> str:
        """Return a digest of all items without times, wherever they are. Raises as ``digests`` does."""
        return hashlib.blake2b(b"".join(self.digests(times=False)), digest_size=16).hexdigest()


def read_media(config: MediaConfig, world: World) -> MediaItems:
    """Read the tables that ``config`` names and look for each file; collective.

    Raises ConfigError on every rank, with the same text, where a rank cannot read them, or has others.
    """
    with world.phase("reading the table of media"):
        items = MediaItems(config)
        mine = items.digests(times=False)
        for one in items.sets:
            if world.rank == 0 and one.note:
                logger.warning("%s", one.note)
    rows = world.all_gather_object(b"".join(mine), "comparing the media")
    other = next((rank for rank, digests in enumerate(rows) if digests != rows[0]), None)
    if other is None:
        return items
    counts = [len(digests) // 16 for digests in rows]
    fewer = min(counts[0], counts[other])
    first = next((i for i in range(fewer) if rows[0][16 * i :][:16] != rows[other][16 * i :][:16]), fewer)
    # One of the two has the row at which they differ; the shorter table may end before it.
    longer = 0 if counts[0] > first else other
    where = world.broadcast_object(lambda: items.where(first), "naming the row that differs", source=longer)
    raise ConfigError(
        f"the media differ between the ranks: rank {other} ({counts[other]:,} rows) from rank 0 "
        f"({counts[0]:,} rows), first in {where} as rank {longer} reads it. Every rank reads media.source "
        "itself: copy the same files to every machine, or name a directory that they share"
    )
