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
absent from the item. `as_float` gives values in -1 to 1 as diffusers' image processors do, `as_picture` a
Pillow image.

:func:`read_media` is the entry: collective, and the same on every rank when it returns.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch.utils.data import Dataset

from zerostart.distributed.world import World
from zerostart.errors import ConfigError
from zerostart.training.data.decoding import ColumnMedia, media_of_row
from zerostart.training.data.files import MediaFile, files_of, needed
from zerostart.training.data.media_config import KNOWN_COLUMNS, DatasetConfig, MediaConfig
from zerostart.training.data.table import Column, media_columns, read_table, text_column

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")

#: Key of an example's frames a second, where its data set sets them.
FRAME_RATE = "media.frame_rate"
_THREADS = 16  # that look at files, which may lie on a network
_CHUNK = 4096  # rows that are handed to them at a time
_SHOWN = 3  # bad rows that an error names
#: Keys that say where the data are, or how an epoch goes over them, not what is in an item.
_NOT_CONTENT = {"source", "base", "split", "items", "repeats", "workers", "check", "datasets"}
#: Those by which texts are made, which are part of each row's own digest.
_OF_TEXTS = {"caption_prefix", "caption_shuffles", "caption_separator", "caption_keep"}

logger = logging.getLogger("zerostart")


class MediaSet:
    """The rows of one data set: of each as many items as there are orders of its tags, order by order."""

    def __init__(self, config: DatasetConfig, check: str, earlier: RowDigests) -> None:
        """Read the table; raises :class:`ConfigError` where it is absent, malformed, or lacks a column.

        A row whose digest is among the ``earlier`` ones is as it was then: none of its files is opened;
        ``check`` says whether lengths and times of files are enough for that.
        """
        self.config = config
        self._check = check
        self._earlier = earlier
        self._table = read_table(config)
        self._text = text_column(config, self._table.columns)
        self.columns = media_columns(config, self._table)

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self._table.rows)

    def __len__(self) -> int:
        return self.rows * self.config.orders

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Raises :class:`ConfigError`, naming row and file, for what cannot be decoded."""
        item = self._other_cells(index)
        for name, part in self._media(index).items():
            item[name] = self._in_column(index, name, part.tensors)
        return item

    def where(self, index: int) -> str:
        """In words where the row of item ``index`` is."""
        return self._table.where(index % self.rows)

    @cached_property
    def shapes(self) -> list[Hashable]:
        """A key for each item. Raises :class:`ConfigError`, naming row and file."""
        # Orders of a row differ in their texts alone, so the shapes of the first are those of all.
        found: list[Hashable] = [*self._mapped(self._shape, self.rows)]
        return found * self.config.orders

    def _shape(self, index: int) -> Hashable:
        return tuple((name, part.shape) for name, part in self._media(index).items())

    @property
    def settings(self) -> str:
        """How rows are decoded."""
        return repr(sorted(self.config.model_dump(exclude=_NOT_CONTENT | _OF_TEXTS).items()))

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings about a table that can be read."""
        return self._table.notes

    @cached_property
    def described(self) -> list[Described]:
        """The digests of each item's row. Raises :class:`ConfigError` that names rows with absent files."""
        return self._mapped(self._describe, len(self))

    def _describe(self, index: int) -> Described:
        # Three digests, each of more: the names, then lengths and times of the files, then what is in them.
        # Sorted by column: the order of columns in the table is no content.
        names = hashlib.blake2b(repr(sorted(self._other_cells(index).items())).encode(), digest_size=16)
        files = self._files(index)
        for name, some in files.items():
            names.update(f"{name} {[self._relative(file) for file in some]}".encode("utf-8", "surrogatepass"))
        # One `stat` a file at most, instead of reading it: this is what a start with a known table costs.
        states = [file.state() for some in files.values() for file in some]
        by_name = names.digest()
        names.update(repr(states).encode())
        by_state = names.digest()
        found = None
        if None in states:  # what is gone is what it was
            found = self._earlier.by_name.get(by_name)
        elif self._check == "times":
            found = self._earlier.by_state.get(by_state)
        return by_name, by_state, self._row_digest(index) if found is None else found

    def _relative(self, file: MediaFile) -> str:
        if file.path is None:
            return hashlib.blake2b(file.data or b"", digest_size=16).hexdigest()
        base = self._table.base
        # Relative, so that a table that has moved together with its files is still recognised.
        return str(file.path.relative_to(base)) if file.path.is_relative_to(base) else file.name

    def _row_digest(self, index: int) -> bytes:
        state = hashlib.blake2b(repr(sorted(self._other_cells(index).items())).encode(), digest_size=16)
        for name, files in self._files(index).items():
            state.update(f"{name} {len(files)} ".encode())
            for file in files:
                state.update(self._in_column(index, name, partial(_digest, file)))
        return state.digest()

    def _mapped(self, function: Callable[[int], T], count: int) -> list[T]:
        found: list[T] = []
        failures: list[str] = []
        # Files may lie on a network: most of the time is waiting.
        with ThreadPoolExecutor(_THREADS) as threads:
            # In chunks, for `map` would make a future for each of millions of rows at once.
            for start in range(0, count, _CHUNK):
                rows = range(start, min(start + _CHUNK, count))
                for outcome in threads.map(lambda row: _outcome(function, row), rows):
                    # Results come in the order of the rows, whichever thread is done first: errors name the
                    # first ones.
                    if isinstance(outcome, ConfigError):
                        failures.append(str(outcome))
                    else:
                        found.append(outcome)
        if failures:
            more = f"; and {len(failures) - _SHOWN} more rows" if len(failures) > _SHOWN else ""
            raise ConfigError("; ".join(failures[:_SHOWN]) + more)
        return found

    def _in_column(self, index: int, name: str, act: Callable[[], T]) -> T:
        """``act``, whose error gets the row and the column before it."""
        try:
            return act()
        except (ConfigError, OSError) as error:
            raise ConfigError(f"{self._place(index, name)}: {error}") from error

    def _place(self, index: int, name: str) -> str:
        column = next(column.column for column in self.columns if column.name == name)
        return f"{self.where(index)}, column {column!r}"

    def _other_cells(self, index: int) -> dict[str, object]:
        """The text, and what names no files."""
        # Items lie order by order: all rows in the first one, then all in the second.
        order, number = divmod(index, self.rows)
        row, prompt = self._table.rows[number], self._text
        taken = {column.column for column in self.columns} | {prompt}
        # By the name of pictures and videos encoders look for these, and not for what is left of a table.
        cells = {name: v for name, v in row.items() if name not in taken and name not in KNOWN_COLUMNS}
        if prompt is not None and prompt not in row:
            raise ConfigError(
                f"{self.where(index)}: no {prompt!r}; write an empty text for a row without one"
            )
        text = "" if prompt is None else row[prompt]
        if text is not None and not isinstance(text, str):
            raise ConfigError(f"{self.where(index)}, column {prompt!r}: {text!r} is not a text")
        return {**cells, "prompt": captioned(text or "", self.config, order)}

    def _files(self, index: int) -> dict[str, tuple[MediaFile, ...]]:
        row, found = self._table.rows[index % self.rows], {}
        for column in self.columns:
            cell, where = row.get(column.column), self._place(index, column.name)
            found[column.name] = files_of(cell, column.kind, self._table.base, where)
        return found

    def _media(self, index: int) -> dict[str, ColumnMedia]:
        files = self._files(index)

        def named(column: Column, act: Callable[[], T]) -> T:
            return self._in_column(index, column.name, act)

        if not any(files.values()):
            names = ", ".join(column.column for column in self.columns)
            raise ConfigError(f"{self.where(index)}: its cells under {names} are all empty; remove the row")
        return media_of_row(self.columns, files, self.config, named)


def captioned(text: str, config: DatasetConfig, order: int) -> str:
    """The text of a row with its prefix, and its tags in the order with that number."""
    if config.caption_shuffles:
        tags = [tag.strip() for tag in text.split(config.caption_separator)]
        # Tags at the beginning, a trigger word say, stay in front in every order.
        kept, others = tags[: config.caption_keep], tags[config.caption_keep :]
        # By digests, which any version of any library makes alike; equal tags are told apart by their places.
        draws = {
            place: hashlib.blake2b(f"{text}\0{order}\0{place}".encode("utf-8", "surrogatepass")).digest()
            for place in range(len(others))
        }
        shuffled = [others[place] for place in sorted(draws, key=draws.__getitem__)]
        text = f"{config.caption_separator} ".join(kept + shuffled)
    return config.caption_prefix + text


class MediaItems(Dataset[dict[str, Any]]):
    """The items of all data sets, one set after the other, each decoded when it is asked for.

    ``repeats`` are for what is made of them.
    """

    def __init__(self, config: MediaConfig, earlier: RowDigests | None = None) -> None:
        """Read the tables; raises :class:`ConfigError` where one is absent, malformed, or lacks a column.

        A row whose digest is among the ``earlier`` ones is as it was then: none of its files is opened.
        """
        self.config = config
        self._earlier = RowDigests() if earlier is None else earlier
        self.sets = [MediaSet(one, config.check, self._earlier) for one in config.sets]
        self._ends = list(itertools.accumulate(map(len, self.sets)))

    @property
    def columns(self) -> tuple[Column, ...]:
        """Those of the first data set."""
        return self.sets[0].columns

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Raises :class:`ConfigError`, naming row and file, for what cannot be decoded."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        found, place = self._at(index)
        return found[place]

    def _at(self, index: int) -> tuple[MediaSet, int]:
        """The set of an item, and its place there."""
        # The first set whose end lies beyond the item; an end belongs to the next set, hence `right`.
        number = bisect.bisect_right(self._ends, index)
        return self.sets[number], index - (self._ends[number - 1] if number else 0)

    def where(self, index: int) -> str:
        """In words where the row of item ``index`` is."""
        found, place = self._at(index)
        return found.where(place)

    def frame_rate(self, index: int) -> float | None:
        """Frames a second of item ``index``, where its data set sets them."""
        return self._at(index)[0].config.frame_rate

    def shapes(self) -> list[Hashable]:
        """A key for each item: those with the same key have tensors of the same shapes. By headers alone.

        Raises :class:`ConfigError`, naming row and file.
        """
        return [key for one in self.sets for key in one.shapes]

    def contents(self) -> str:
        """A digest of all rows: their cells, and of each file its length, its first and its last 64 KiB.

        Of a file that may be not compressed, and so change in its middle alone, all is looked at.

        It does not depend on where files lie, or on what they are called. Raises :class:`ConfigError` that
        names the rows whose files are absent.
        """
        # Digests have one length, so that joining them is unambiguous.
        return hashlib.blake2b(b"".join(self.row_digests), digest_size=16).hexdigest()

    def digest(self) -> str:
        """That of `contents` and of how they are decoded. Raises :class:`ConfigError` as `contents` does."""
        # Of one set its settings; of several how many items each has, too.
        settings = self.sets[0].settings
        if len(self.sets) > 1:
            settings = repr([(len(one), one.settings) for one in self.sets])
        return hashlib.blake2b(f"{self.contents()} {settings}".encode(), digest_size=16).hexdigest()

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings about tables that can be read."""
        return tuple(note for one in self.sets for note in one.notes)

    @property
    def row_digests(self) -> list[bytes]:
        """One of 16 bytes for each item. Raises :class:`ConfigError` as `contents` does."""
        return [digest for one in self.sets for _, _, digest in one.described]

    @cached_property
    def keys(self) -> list[bytes]:
        """Of each item 16 bytes for its row and how that is decoded; equal ones give equal items."""
        return [
            # The settings are each set's own: the same file in another size is another item.
            hashlib.blake2b(digest + one.settings.encode(), digest_size=16).digest()
            for one in self.sets
            for _, _, digest in one.described
        ]

    @property
    def digests_to_remember(self) -> RowDigests:
        """Those of the rows, and where these are the first of a table alone, the earlier ones of others."""
        part = any(one.config.items for one in self.sets)
        every = (found for one in self.sets for found in one.described)
        return RowDigests.of(every, self._earlier if part else RowDigests())


def _outcome(function: Callable[[int], T], row: int) -> T | ConfigError:
    try:
        return function(row)
    except ConfigError as error:
        return error


def _digest(file: MediaFile) -> bytes:
    if not file.exists():
        raise ConfigError(
            f"{file.name}: no such file; media.base is the directory to which names are relative"
        )
    if file.path is not None and file.path.is_dir() and not file.stills():
        raise ConfigError(f"{file.name}: no frames in this directory")
    return file.digest()


def read_media(config: MediaConfig, world: World, earlier: RowDigests | None = None) -> MediaItems:
    """The media that ``config`` names; each file is there, or its row among the ``earlier`` ones. Collective.

    Raises :class:`ConfigError` on every rank, with the same text, where a rank cannot read them, or has
    others.
    """
    with world.phase("reading the table of media"):
        items = MediaItems(config, earlier)
        # Inside the phase: a rank that cannot read its table raises on all, before they compare.
        mine = (len(items), items.digest())
        if world.rank == 0:
            for note in items.notes:
                logger.warning("%s", note)
    # One digest a rank first; the digests of all rows are exchanged where these differ alone.
    ranks = world.all_gather_object(mine, "comparing the media")
    if len(set(ranks)) == 1:
        return items
    rows = world.all_gather_object(b"".join(items.row_digests), "looking for the rows that differ")
    other = next(rank for rank, digest in enumerate(ranks) if digest != ranks[0])
    if rows[other] == rows[0]:
        raise ConfigError(
            f"the ranks are configured differently: rank {other} decodes the media in another way "
            "than rank 0; start all of them with the same configuration"
        )
    fewer = min(ranks[0][0], ranks[other][0])
    first = next((i for i in range(fewer) if rows[0][16 * i :][:16] != rows[other][16 * i :][:16]), fewer)
    # One of the two has the row at which they differ; the shorter table may end before it.
    longer = 0 if ranks[0][0] > first else other
    where = world.broadcast_object(lambda: items.where(first), "naming the row that differs", source=longer)
    raise ConfigError(
        f"the media differ between the ranks: rank {other} ({ranks[other][0]:,} rows) from "
        f"rank 0 ({ranks[0][0]:,} rows), first in {where} as rank {longer} reads it. Every "
        "rank reads media.source itself: copy the same files to every machine, or name a "
        "directory that they share"
    )


def as_float(pixels: torch.Tensor) -> torch.Tensor:
    """uint8 of 0 to 255, of any shape, as float32 of -1 to 1, bit for bit as diffusers' processors do."""
    # Divided first and scaled then: `pixels / 127.5 - 1` would round otherwise.
    return 2.0 * (pixels.to(torch.float32) / 255.0) - 1.0


def as_picture(pixels: torch.Tensor) -> Image:
    """uint8 [3, H, W] as a Pillow image of mode RGB. Raises :class:`ConfigError` where Pillow is absent."""
    return needed("PIL.Image").fromarray(pixels.permute(1, 2, 0).contiguous().numpy())


#: Digests, of 16 bytes, of a row's names, of these with lengths and times of its files, and of its contents.
Described: TypeAlias = tuple[bytes, bytes, bytes]
_SIZE = 16


@dataclass(frozen=True)
class RowDigests:
    """The digests of the contents of rows by the two others, as they were at an earlier start.

    A row that is found here needs none of its files opened.
    """

    by_name: Mapping[bytes, bytes] = field(default_factory=dict)
    by_state: Mapping[bytes, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Iterable[Described], before: RowDigests) -> RowDigests:
        """Those from ``before``, and of ``rows``; of rows with the same names the last one counts."""
        by_name, by_state = dict(before.by_name), dict(before.by_state)
        for name, state, contents in rows:
            # Kept under both: states are asked for as long as files are there, names once they are gone.
            by_name[name] = contents
            by_state[state] = contents
        return cls(by_name, by_state)

    def packed(self) -> bytes:
        """As bytes."""
        parts = (b"".join(key + value for key, value in one.items()) for one in (self.by_name, self.by_state))
        names, states = parts
        # Pairs of 16 bytes each, keys and values in turn; the length says where the second table begins.
        return len(names).to_bytes(8, "little") + names + states

    @classmethod
    def unpacked(cls, data: bytes) -> RowDigests:
        """From ``packed``; nothing of what is damaged."""
        end = 8 + int.from_bytes(data[:8], "little")
        # A damaged note costs one reading of the files, so it is no error.
        if len(data) < 8 or end > len(data) or (end - 8) % (2 * _SIZE) or (len(data) - end) % (2 * _SIZE):
            return cls()
        return cls(_pairs(data[8:end]), _pairs(data[end:]))


def _pairs(data: bytes) -> dict[bytes, bytes]:
    starts = range(0, len(data), 2 * _SIZE)
    return {data[at : at + _SIZE]: data[at + _SIZE : at + 2 * _SIZE] for at in starts}
