"""Decoded examples, the input of a task's encoders.

One row of the table becomes one item::

    {
        "prompt": str,                      # "" if the row or the table has none
        "image": uint8 [3, H, W],           # kind image
        "video": uint8 [3, F, H, W],        # kind video; a picture in such a column is a video of one frame
        "edit_image": [uint8 [3, h, w]],    # kind images: a list, empty if the cell is
        "media.frame_rate": float,          # if the data set configures it
        "seed": "12", ...                   # other columns as the table has them, except the names above
    }

with red, green and blue of 0 to 255 on the CPU. An empty cell of kind image or video is absent from the item.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from torch.utils.data import ConcatDataset, Dataset

from zerostart.distributed.world import World
from zerostart.errors import ConfigError
from zerostart.training.data.media import MediaFile, decode_row
from zerostart.training.data.media_config import KNOWN_COLUMNS, DatasetConfig, MediaConfig
from zerostart.training.data.table import find_files, find_media_columns, find_text_column, read_table
from zerostart.training.loop.course import agree

#: Key of an example's frames a second.
FRAME_RATE = "media.frame_rate"
#: Threads that look at files, which may be on a network.
_THREADS = 16
#: Bad rows that an error names.
_SHOWN = 3
#: Keys that do not change the content of an item.
_NOT_CONTENT = {"source", "base", "split", "items", "repeats", "workers", "datasets", "caption_prefix"}


class MediaSet(Dataset[dict[str, Any]]):
    """The rows of one data set."""

    def __init__(self, config: DatasetConfig) -> None:
        """Read the table; raises ConfigError if it is absent, malformed, or lacks a column."""
        self.config = config
        self._table = read_table(config)
        self._text = find_text_column(config, self._table.columns)
        self.columns = find_media_columns(config, self._table)
        self._settings = repr(sorted(config.model_dump(exclude=_NOT_CONTENT).items()))

    def __len__(self) -> int:
        return len(self._table.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Decode an item; raises ConfigError that names the row."""
        with self._errors_named(index):
            files = self._files(index)
            if not any(files.values()):
                names = ", ".join(column.column for column in self.columns)
                raise ConfigError(f"its cells under {names} are all empty; remove the row")
            rate = self.config.frame_rate
            more = {} if rate is None else {FRAME_RATE: rate}
            return {**self._cells(index), **decode_row(self.columns, files, self.config), **more}

    def where(self, index: int) -> str:
        """Return the place of the row of item ``index``, for messages."""
        return self._table.where(index)

    def digest(self, index: int) -> tuple[bytes, bytes]:
        """Return two digests of an item, without and with names and times of its files.

        Raises ConfigError that names the row of an absent file.
        """
        with self._errors_named(index):
            # Sorted: the order of columns in the table is no content.
            cells = repr(sorted(self._cells(index).items()))
            text = f"{self._settings} {cells}"
            hashed = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16)
            states, names = [], []
            for name, files in self._files(index).items():
                states.append([file.state() for file in files])
                names.append([self._relative(file) for file in files])
                sizes = [one if isinstance(one, str) else [size for size, _ in one] for one in states[-1]]
                hashed.update(f"{name} {sizes}".encode())
            content = hashed.digest()
            hashed.update(f"{names} {states}".encode("utf-8", "surrogatepass"))
            return content, hashed.digest()

    def _relative(self, file: MediaFile) -> str:
        if file.path is None:
            return ""
        # A table that was moved together with its files is recognised.
        base = self._table.base
        return str(file.path.relative_to(base)) if file.path.is_relative_to(base) else file.name

    @contextmanager
    def _errors_named(self, index: int) -> Iterator[None]:
        try:
            yield
        except (ConfigError, OSError) as error:
            raise ConfigError(f"{self.where(index)}: {error}") from error

    def _cells(self, index: int) -> dict[str, object]:
        """Return the text and the cells that name no files."""
        row, prompt = self._table.rows[index], self._text
        # Encoders find media by the names in KNOWN_COLUMNS, so no other cell may have one of them.
        excluded = {column.column for column in self.columns} | {prompt} | KNOWN_COLUMNS.keys()
        if prompt is not None and prompt not in row:
            raise ConfigError(f"no {prompt!r}; write an empty text for a row without one")
        text = "" if prompt is None else row[prompt]
        if text is not None and not isinstance(text, str):
            raise ConfigError(f"column {prompt!r}: {text!r} is not a text")
        cells = {name: cell for name, cell in row.items() if name not in excluded}
        return {**cells, "prompt": self.config.caption_prefix + (text or "")}

    def _files(self, index: int) -> dict[str, tuple[MediaFile, ...]]:
        row, base = self._table.rows[index], self._table.base
        return {one.name: find_files(row.get(one.column), one.kind, base, one.column) for one in self.columns}


class MediaItems(ConcatDataset[dict[str, Any]]):
    """The items of all data sets, one set after the other, decoded on access."""

    def __init__(self, config: MediaConfig) -> None:
        """Read the tables; raises ConfigError if one is absent, malformed, or lacks a column."""
        self.config = config
        self.sets = [MediaSet(one) for one in config.sets]
        super().__init__(self.sets)

    def _at(self, index: int) -> tuple[MediaSet, int]:
        """Return the set of an item and the item's index in it."""
        number = bisect.bisect_right(self.cumulative_sizes, index)
        return self.sets[number], index - (self.cumulative_sizes[number - 1] if number else 0)

    def where(self, index: int) -> str:
        """Return the place of the row of item ``index``, for messages."""
        media_set, place = self._at(index)
        return media_set.where(place)

    @cached_property
    def digests(self) -> list[tuple[bytes, bytes]]:
        """Digests of each item, as ``MediaSet.digest`` has them.

        Raises ConfigError that names the rows of absent files.
        """

        def find(index: int) -> tuple[bytes, bytes] | ConfigError:
            found, place = self._at(index)
            try:
                return found.digest(place)
            except ConfigError as error:
                return error

        with ThreadPoolExecutor(_THREADS) as threads:
            outcomes = list(threads.map(find, range(len(self))))
        failures = [str(outcome) for outcome in outcomes if isinstance(outcome, ConfigError)]
        if failures:
            more = f"; and {len(failures) - _SHOWN} more rows" if len(failures) > _SHOWN else ""
            raise ConfigError("; ".join(failures[:_SHOWN]) + more)
        return [outcome for outcome in outcomes if not isinstance(outcome, ConfigError)]


def read_media(config: MediaConfig, world: World) -> MediaItems:
    """Read the tables that ``config`` names and look for each file; collective.

    Raises ConfigError on every rank if a rank cannot read them or has other rows or files.
    """
    with world.phase("reading the table of media"):
        items = MediaItems(config)
        contents = hashlib.blake2b(b"".join(content for content, _ in items.digests), digest_size=16)
    agree({"the media": f"{len(items)} rows, {contents.hexdigest()}"}, world)
    return items
