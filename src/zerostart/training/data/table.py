"""Tables of media: CSV, JSON, JSON lines, directories of files with texts, Hugging Face ``datasets``.

And which of their columns name files.
"""

from __future__ import annotations

import csv
import difflib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from zerostart.checkpoint.paths import expanded
from zerostart.errors import ConfigError
from zerostart.training.config.parsing import parsed_json
from zerostart.training.data.files import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from zerostart.training.data.media_config import (
    FILE_COLUMN,
    KNOWN_COLUMNS,
    TEXT_COLUMNS,
    ColumnConfig,
    DatasetConfig,
    Kind,
)

Row = Mapping[str, Any]

#: Tables that a directory is looked through for, in this order.
TABLES = ("metadata.csv", "metadata.json", "metadata.jsonl")
_OF_TABLES = (".csv", ".json", ".jsonl", ".arrow")
_KNOWN_SUFFIXES = f"pictures are known by {' '.join(IMAGE_SUFFIXES)}, videos by {' '.join(VIDEO_SUFFIXES)}"
#: What a source begins with that ``datasets`` is to load.
_PREFIX = "hf:"


class Rows(Protocol):
    """Rows of cells by column; those of a dataset are read when they are asked for."""

    def __len__(self) -> int:
        """How many there are."""

    def __getitem__(self, index: int, /) -> Row:
        """One of them."""

    def __iter__(self) -> Iterator[Row]:
        """All of them, in their order."""


@dataclass(frozen=True)
class Table:
    """Rows in an order that is always the same; names of files in them are relative to ``base``.

    ``where(i)`` says in words where row ``i`` is; ``columns`` are those of any row.
    """

    rows: Rows
    columns: tuple[str, ...]
    base: Path
    where: Callable[[int], str]
    notes: tuple[str, ...] = ()


def read_table(config: DatasetConfig) -> Table:
    """The first ``config.items`` rows (0: all) of the table, directory or dataset at ``config.source``.

    The texts beside the files of a directory become the column ``config.prompt``; None asks for none.
    Raises :class:`ConfigError` for what is absent, malformed or empty; it names the line.
    """
    source, base, items = config.source, config.base, config.items
    if _is_dataset(source):
        return _read_dataset(source, config.split, base, items)
    path = expanded(source)
    if path.is_dir():
        # A table in the directory goes before looking for files: it says which of them are meant.
        tables = [path / name for name in TABLES if (path / name).is_file()]
        if len(tables) > 1:
            names = " and ".join(table.name for table in tables)
            raise ConfigError(f"media.source {source} has {names}; name the file to use")
        if not tables:
            notes: list[str] = []
            found = _files_in(path, config.prompt, items, notes)
            table = _table(found, source, path if base is None else Path(base), items)
            return replace(table, notes=tuple(notes))
        # From here on as if the table had been named; its directory is the base all the same.
        path = tables[0]
    if not path.is_file():
        raise ConfigError(f"media.source {source}: no such file or directory")
    readers = {".csv": _csv_rows, ".json": _json_rows, ".jsonl": _jsonl_rows}
    if path.suffix.lower() not in readers:
        raise ConfigError(
            f"media.source {source}: a table is a .csv, .json or .jsonl file, not {path.suffix or path.name}"
        )
    rows = readers[path.suffix.lower()](path)
    return _table(rows, str(path), path.parent if base is None else Path(base), items)


def _table(found: Iterator[tuple[str, Row]], source: str, base: Path, items: int) -> Table:
    try:
        # The rows are made while they are read, so errors of the file come up here.
        pairs = list(itertools.islice(found, items or None))
    except UnicodeDecodeError as error:
        raise ConfigError(f"media.source {source} is not UTF-8 text: {error.reason}") from error
    except OSError as error:
        raise ConfigError(f"media.source {source} cannot be read: {error.strerror}") from error
    if not pairs:
        raise ConfigError(f"media.source {source} is empty: it has no row to train on")
    base = expanded(base)
    if not base.is_dir():
        raise ConfigError(f"media.base {base}: no such directory")
    # Of all rows, in the order in which they first appear: JSON rows need not have the same ones.
    columns = tuple(dict.fromkeys(itertools.chain.from_iterable(row for _, row in pairs)))
    where = [where for where, _ in pairs]
    return Table([row for _, row in pairs], columns, base, where.__getitem__)


def _csv_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Cells are text; an empty one is None. A row may take several lines, of which the last is named."""
    # Spreadsheets begin UTF-8 with a mark, which would be part of the first column's name. No newline
    # handling, for `csv` needs line breaks within quotes as they are.
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        try:
            # Empty lines before the header are passed over; `csv` gives them as empty rows.
            header = next(filter(None, reader), [])
            _check_header(header, f"{path}, line {reader.line_num}")
            for cells in reader:
                where = f"{path}, line {reader.line_num}"
                if not cells:
                    continue
                if len(cells) != len(header):
                    raise ConfigError(
                        f"{where}: {len(cells)} cells under {len(header)} columns; a text with a comma or a "
                        'line break in it stands in "quotes"'
                    )
                yield where, {name: cell or None for name, cell in zip(header, cells, strict=True)}
        except csv.Error as error:
            raise ConfigError(f"{path}, line {reader.line_num}: not valid CSV: {error}") from error


def _check_header(header: Sequence[str], where: str) -> None:
    if len(set(header)) < len(header) or not all(header):
        raise ConfigError(
            f"{where}: the names of the columns are {', '.join(map(repr, header))}; each column "
            "needs a name of its own"
        )


def _json_rows(path: Path) -> Iterator[tuple[str, Row]]:
    value = parsed_json(path.read_text(encoding="utf-8-sig"), str(path))
    if not isinstance(value, list):
        raise ConfigError(f"{path}: a table is a JSON list of objects, not a JSON {type(value).__name__}")
    for number, row in enumerate(value, start=1):
        yield _object(row, f"{path}, entry {number}")


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Row]]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                yield _object(parsed_json(line, where), where)


def _object(value: Any, where: str) -> tuple[str, Row]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: a row is a JSON object of columns, not a JSON {type(value).__name__}")
    return where, value


def is_gone(source: str) -> bool:
    """Whether there is nothing at ``source`` that a table could be read from; a dataset is not looked for."""
    if _is_dataset(source):
        return False
    path = expanded(source)
    if not path.is_dir():
        return not path.exists()
    return not any(_kind(file) or file.suffix.lower() in _OF_TABLES for file in path.rglob("*"))


def _files_in(folder: Path, prompt: str | None, items: int, notes: list[str]) -> Iterator[tuple[str, Row]]:
    """The first ``items`` pictures and videos (0: all) below ``folder``, by their paths, with their texts.

    What is passed over is put into ``notes``, when all has been looked at.
    """
    without = []
    found = 0
    # By the whole path below the folder: the order is the same on every machine and file system.
    passed: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*"), key=lambda path: path.relative_to(folder).as_posix()):
        kind = _kind(path)
        name = path.relative_to(folder)
        if any(part.startswith(".") for part in name.parts) or not path.is_file():
            continue
        if kind is None:
            if path.suffix.lower() != ".txt":
                passed.setdefault(path.suffix.lower() or "no extension", []).append(name.as_posix())
            continue
        if items and found == items:
            break
        found += 1
        row: dict[str, object] = {kind: name.as_posix()}
        if prompt is not None:
            text = path.with_suffix(".txt")
            if not text.is_file():
                # Noted, and the rows go on: one error counts all files without a text.
                without.append(name.as_posix())
                continue
            row[prompt] = text.read_text(encoding="utf-8-sig").strip()
        yield str(path), row
    if passed:
        skipped = ", ".join(f"{len(names)} {kind} ({names[0]})" for kind, names in sorted(passed.items()))
        notes.append(
            f"media.source {folder}: skipped: {skipped}: {_KNOWN_SUFFIXES}; convert them, or name them in a "
            "table"
        )
    if not found:
        raise ConfigError(
            f"media.source {folder}: no {', '.join(TABLES)}, picture or video in this directory; "
            f"{_KNOWN_SUFFIXES}"
        )
    if without:
        shown = ", ".join(without[:3]) + (", ..." if len(without) > 3 else "")
        raise ConfigError(
            f"media.source {folder}: {len(without)} files have no .txt of the same name with their text "
            f"({shown}); write them, or set media.prompt to null for a model without texts"
        )


def _kind(path: Path) -> str | None:
    suffix = path.suffix.lower()
    return "image" if suffix in IMAGE_SUFFIXES else "video" if suffix in VIDEO_SUFFIXES else None


@dataclass(frozen=True)
class Column:
    """A column of files: ``column`` in the table, ``name`` in the items.

    ``own_size``: each of its pictures has a size for itself.
    """

    name: str
    column: str
    kind: Kind
    own_size: bool


def text_column(config: DatasetConfig, columns: Sequence[str]) -> str | None:
    """The column of texts; None where there are to be none. Raises :class:`ConfigError` where there is none.

    The name by default stands for those that other tools' tables have, as well.
    """
    if config.prompt is None or config.prompt in columns:
        return config.prompt
    others = [name for name in TEXT_COLUMNS if name in columns]
    if config.prompt != DatasetConfig.model_fields["prompt"].default or not others:
        raise _absent(config.prompt, columns, "media.prompt names the column of texts; null: there are none")
    if len(others) > 1:
        raise ConfigError(
            f"media.source {config.source} has the columns {' and '.join(others)}, and either may be that of "
            "the texts: name one in media.prompt"
        )
    return others[0]


def media_columns(config: DatasetConfig, table: Table) -> tuple[Column, ...]:
    """What ``config`` makes of a ``table``; the columns that give an item its size come first.

    Raises :class:`ConfigError` where the table lacks one that is named, or has none with files at all.
    """
    columns = table.columns
    given = config.columns or {name: name for name in KNOWN_COLUMNS if name in columns}
    if not given and FILE_COLUMN in columns:
        # A video where one of them is: a picture among videos is a video of one frame.
        names = (row.get(FILE_COLUMN) for row in table.rows)
        videos = any(isinstance(name, str) and _kind(Path(name)) == "video" for name in names)
        given = {"video" if videos else "image": FILE_COLUMN}
    if not given:
        raise ConfigError(
            f"media.source {config.source}: none of its columns ({', '.join(columns)}) is one of "
            f"{', '.join(KNOWN_COLUMNS)}; say in media.columns which columns name files, such as "
            "columns: {image: file_name}"
        )
    found = [_column(name, value) for name, value in given.items()]
    for column in found:
        if column.column not in columns:
            raise _absent(column.column, columns, f"media.columns.{column.name} names it")
    leading = [name for name in KNOWN_COLUMNS if name in ("video", "image")]
    # A stable sort: video, then image, then the others as the table or the configuration has them.
    found.sort(key=lambda column: leading.index(column.name) if column.name in leading else len(leading))
    return tuple(found)


def _column(name: str, value: str | ColumnConfig) -> Column:
    given = ColumnConfig(column=value) if isinstance(value, str) else value
    kind, size = KNOWN_COLUMNS.get(name, (None, None))
    kind = given.kind or kind
    assert kind is not None, "the configuration was checked for it"
    # The configuration, then what is known of the name, then by the kind: lists have unlike pictures.
    size = given.size or size or ("own" if kind == "images" else "item")
    return Column(name, given.column or name, kind, size == "own")


def _absent(column: str, columns: Sequence[str], how: str) -> ConfigError:
    near = difflib.get_close_matches(column, columns, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    return ConfigError(f"the table of media has no column {column!r} but {', '.join(columns)} ({how}){hint}")


def _is_dataset(source: str) -> bool:
    path = expanded(source)
    saved = (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    return source.startswith(_PREFIX) or saved or (path / "dataset_dict.json").is_file()


def _read_dataset(source: str, split: str, base: str | None, items: int) -> Table:
    """The first ``items`` rows (0: all) of a split, read when they are asked for.

    Raises :class:`ConfigError` where the library, the dataset or the split is absent.
    """
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"media.source {source} is a Hugging Face dataset, but the package datasets cannot be "
            f"imported ({error}): pip install datasets"
        ) from error
    try:
        if source.startswith(_PREFIX):
            found = datasets.load_dataset(source.removeprefix(_PREFIX), split=split)
        else:
            found = datasets.load_from_disk(str(expanded(source)))
    except Exception as error:  # of many types
        reason = " ".join(str(error).split())
        raise ConfigError(f"media.source {source}: cannot load the split {split!r}: {reason}") from error
    # `load_from_disk` of all splits gives a dict of them, and takes no split itself.
    if isinstance(found, dict):
        if split not in found:
            raise ConfigError(
                f"media.source {source} has no split {split!r}; media.split is one of {', '.join(found)}"
            )
        found = found[split]
    if not len(found):
        raise ConfigError(f"media.source {source} is empty: it has no row to train on")
    # The library would decode every file of a row when the row is asked for, by its own rules; here that is
    # done later, and by ours.
    for name, feature in found.features.items():
        found = found.cast_column(name, _undecoded(feature, datasets))
    # Both keep rows on the disk: nothing is read before it is asked for.
    rows = found.select(range(min(items, len(found)))) if items else found
    base_path = expanded(base or ".")
    return Table(rows, tuple(found.features), base_path, partial(_place, source, split))


def _place(source: str, split: str, index: int) -> str:
    return f"{source}, row {index} of {split}"


def _undecoded(feature: Any, datasets: Any) -> Any:
    media = tuple(getattr(datasets, name) for name in ("Image", "Video") if hasattr(datasets, name))
    if isinstance(feature, media):
        return replace(feature, decode=False)
    inner = getattr(feature, "feature", None)  # of a list
    if isinstance(inner, media):
        return replace(feature, feature=replace(inner, decode=False))
    return feature
