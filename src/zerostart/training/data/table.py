"""Tables of media: CSV, JSON, JSON lines, directories of files with texts, Hugging Face ``datasets``."""

from __future__ import annotations

import codecs
import csv
import difflib
import io
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from zerostart.checkpoint.paths import expanded
from zerostart.errors import ConfigError
from zerostart.training.config.parsing import parsed_json
from zerostart.training.data.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES, MediaFile, similar_path
from zerostart.training.data.media_config import (
    FILE_COLUMN,
    KNOWN_COLUMNS,
    TEXT_COLUMNS,
    Column,
    ColumnConfig,
    DatasetConfig,
    Kind,
)

Row = Mapping[str, Any]

#: Tables that a directory is searched for, in this order.
TABLES = ("metadata.csv", "metadata.json", "metadata.jsonl")
_KNOWN_SUFFIXES = f"pictures are known by {' '.join(IMAGE_SUFFIXES)}, videos by {' '.join(VIDEO_SUFFIXES)}"
#: Prefix of a source that ``datasets`` is to load.
_PREFIX = "hf:"
#: A directory that ``datasets`` saved has one of these files.
_SAVED = ("dataset_info.json", "dataset_dict.json")


@dataclass(frozen=True)
class Table:
    """Rows of cells by column; names of files in them are relative to ``base``.

    Rows of a dataset are read when they are asked for. ``where(i)`` says where row ``i`` is;
    ``columns`` are those of any row; ``note`` is a warning.
    """

    rows: Any  # a sequence of `Row`
    columns: tuple[str, ...]
    base: Path
    where: Callable[[int], str]
    note: str = ""


def read_table(config: DatasetConfig) -> Table:
    """Read the first ``config.items`` rows (0: all) of the table, directory or dataset ``config.source``.

    The texts beside the files of a directory become the column ``config.prompt``. Raises ConfigError for a
    table that is absent, malformed or empty; it names the line.
    """
    source, base = config.source, config.base
    path = expanded(source)
    if source.startswith(_PREFIX) or any((path / name).is_file() for name in _SAVED):
        return _read_dataset(config)
    if path.is_dir():
        tables = [path / name for name in TABLES if (path / name).is_file()]
        if len(tables) > 1:
            names = " and ".join(table.name for table in tables)
            raise ConfigError(f"media.source {source} has {names}; name the file to use")
        if not tables:
            found, note = _files_in(path, config)
            return replace(_table(iter(found), source, path if base is None else Path(base), 0), note=note)
        path = tables[0]
    if not path.is_file():
        near = similar_path(path)
        raise ConfigError(f"media.source {source}: no such file or directory{f'; {near}' if near else ''}")
    readers = {".csv": _csv_rows, ".json": _json_rows, ".jsonl": _jsonl_rows}
    if path.suffix.lower() not in readers:
        raise ConfigError(
            f"media.source {source}: a table is a .csv, .json or .jsonl file, not {path.suffix or path.name}"
        )
    rows = readers[path.suffix.lower()](path)
    return _table(rows, str(path), path.parent if base is None else Path(base), config.items)


def _table(found: Iterator[tuple[str, Row]], source: str, base: Path, items: int) -> Table:
    pairs = list(itertools.islice(found, items or None))
    if not pairs:
        raise ConfigError(f"media.source {source} is empty: it has no row to train on")
    base = expanded(base)
    if not base.is_dir():
        near = similar_path(base)
        raise ConfigError(f"media.base {base}: no such directory{f'; {near}' if near else ''}")
    # JSON rows need not have the same columns.
    columns = tuple(dict.fromkeys(itertools.chain.from_iterable(row for _, row in pairs)))
    where = [where for where, _ in pairs]
    return Table([row for _, row in pairs], columns, base, where.__getitem__)


def read_text(path: Path) -> str:
    """Read a text file in UTF-8; raises ConfigError that names the line with other bytes."""
    try:
        data = path.read_bytes()
        text = data.decode("utf-8-sig")
        if "\0" not in text:
            return text
        place, reason = data.index(0), "a NUL character"
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        place = error.start + len(data) - len(error.object)  # which lacks a byte order mark
        reason = f"the byte 0x{data[place]:02x}"
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        reason = "UTF-16"
    line = data.count(b"\n", 0, place) + 1
    raise ConfigError(
        f"{path}, line {line}: not UTF-8 text ({reason}); tables and texts are read as UTF-8 only, with or "
        "without a byte order mark: save the file as UTF-8"
    )


def _csv_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield rows of text, None for an empty cell; of a row of several lines the last is named."""
    # No newline handling, for `csv` needs line breaks within quotes as they are.
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        # `csv` gives empty lines as empty rows.
        header = next(filter(None, reader), [])
        where = f"{path}, line {reader.line_num}"
        if len(header) == 1 and (other := next((mark for mark in ";\t" if mark in header[0]), None)):
            told = "semicolons" if other == ";" else "tabs"
            raise ConfigError(f"{where}: {told} between the columns; save the table with commas")
        if len(set(header)) < len(header) or not all(header):
            raise ConfigError(
                f"{where}: the names of the columns are {', '.join(map(repr, header))}; each column "
                "needs a name of its own"
            )
        for cells in filter(None, reader):
            where = f"{path}, line {reader.line_num}"
            if len(cells) != len(header):
                raise ConfigError(
                    f"{where}: {len(cells)} cells under {len(header)} columns; a text with a comma or a "
                    'line break in it stands in "quotes"'
                )
            yield where, {name: cell or None for name, cell in zip(header, cells, strict=True)}
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num}: not valid CSV: {error}") from error


def _json_rows(path: Path) -> Iterator[tuple[str, Row]]:
    value = parsed_json(read_text(path), str(path))
    if not isinstance(value, list):
        raise ConfigError(f"{path}: a table is a JSON list of objects, not a JSON {type(value).__name__}")
    for number, row in enumerate(value, start=1):
        yield _json_row(row, f"{path}, entry {number}")


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Row]]:
    for number, line in enumerate(io.StringIO(read_text(path), newline=None), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield _json_row(parsed_json(line, where), where)


def _json_row(value: Any, where: str) -> tuple[str, Row]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: a row is a JSON object of columns, not a JSON {type(value).__name__}")
    return where, value


def _files_in(folder: Path, config: DatasetConfig) -> tuple[list[tuple[str, Row]], str]:
    """Return the pictures and videos below ``folder`` with their texts, and a note on other files.

    They are in the order of their paths below the folder, the same on every machine.
    """
    found: list[tuple[str, Row]] = []
    without: list[str] = []
    skipped: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*"), key=lambda path: path.relative_to(folder).as_posix()):
        name, suffix = path.relative_to(folder), path.suffix.lower()
        if any(part.startswith(".") for part in name.parts) or not path.is_file():
            continue
        if (kind := _kind(path)) is None:
            if suffix != ".txt":
                skipped.setdefault(suffix or "no extension", []).append(name.as_posix())
        elif not config.items or len(found) < config.items:
            text = path.with_suffix(".txt")
            row = {kind: name.as_posix()}
            if config.prompt is not None and text.is_file():
                row[config.prompt] = read_text(text).strip()
            elif config.prompt is not None:
                without.append(name.as_posix())
            found.append((str(path), row))
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
    told = ", ".join(f"{len(names)} {kind} ({names[0]})" for kind, names in sorted(skipped.items()))
    note = f"media.source {folder}: skipped: {told}: {_KNOWN_SUFFIXES}; convert them, or name them in a table"
    return found, note if skipped else ""


def _kind(path: Path) -> str | None:
    suffix = path.suffix.lower()
    return "image" if suffix in IMAGE_SUFFIXES else "video" if suffix in VIDEO_SUFFIXES else None


def files_of(cell: object, kind: Kind, base: Path, where: str) -> tuple[MediaFile, ...]:
    """Return the files that a cell names, relative to ``base`` or absolute, or whose bytes it holds.

    A text that begins with ``[`` is a JSON list, as CSV needs it, where several files can be. Raises
    ConfigError, which ``where`` begins, for what names no file.
    """
    if kind != "image" and isinstance(cell, str) and cell.lstrip().startswith("["):
        try:
            cell = json.loads(cell)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: {cell!r} is not a JSON list of files: {error}") from error
    if cell is None or cell == "":
        return ()
    if not isinstance(cell, (list, tuple)):
        return (_file(cell, base, where),)
    if kind == "image":
        raise ConfigError(
            f"{where}: a list of files, but the column holds one picture; set the kind of the "
            "column to images in media.columns"
        )
    return tuple(_file(part, base, where) for part in cell)


def _file(cell: object, base: Path, where: str) -> MediaFile:
    if isinstance(cell, dict) and cell.keys() == {"bytes", "path"}:
        # The path in a saved dataset may be of another machine.
        if cell["bytes"] is not None:
            return MediaFile(cell["path"] or where, None, cell["bytes"])
        cell = cell["path"]
    if not isinstance(cell, str) or not cell:
        raise ConfigError(f"{where}: {cell!r} is not the name of a file")
    if cell.startswith(("http://", "https://")):
        raise ConfigError(f"{where}: {cell} is a URL; download the file, and give its path")
    path = base / cell
    return MediaFile(str(path), path)


def text_column(config: DatasetConfig, columns: Sequence[str]) -> str | None:
    """Return the column of texts, None where there are to be none; raises ConfigError if it is absent.

    The default name stands for those that other tools' tables have, as well.
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
    """Return the columns of files in a ``table``; those that give an item its size come first.

    Raises ConfigError where the table lacks one that is named, or has none with files at all.
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
    leading = {"video": 0, "image": 1}
    return tuple(sorted(found, key=lambda column: leading.get(column.name, 2)))


def _column(name: str, value: str | ColumnConfig) -> Column:
    given = ColumnConfig(column=value) if isinstance(value, str) else value
    kind, size = KNOWN_COLUMNS.get(name, (None, None))
    kind = given.kind or kind
    assert kind is not None, "the configuration was checked for it"
    # Lists have unlike pictures.
    size = given.size or size or ("own" if kind == "images" else "item")
    return Column(name, given.column or name, kind, size == "own")


def _absent(column: str, columns: Sequence[str], how: str) -> ConfigError:
    near = difflib.get_close_matches(column, columns, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    return ConfigError(f"the table of media has no column {column!r} but {', '.join(columns)} ({how}){hint}")


def _read_dataset(config: DatasetConfig) -> Table:
    """Open a dataset, whose rows are read when they are asked for.

    Raises ConfigError where the library, the dataset or the split is absent.
    """
    source, split = config.source, config.split
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
    # The library would decode every file of a row when the row is asked for, by its own rules.
    for name, feature in found.features.items():
        found = found.cast_column(name, _undecoded(feature, datasets))
    rows = found.select(range(min(config.items, len(found)))) if config.items else found
    base = expanded(config.base or ".")
    return Table(rows, tuple(found.features), base, partial("{0}, row {2} of {1}".format, source, split))


def _undecoded(feature: Any, datasets: Any) -> Any:
    media = tuple(getattr(datasets, name) for name in ("Image", "Video") if hasattr(datasets, name))
    if isinstance(feature, media):
        return replace(feature, decode=False)
    inner = getattr(feature, "feature", None)  # of a list
    if isinstance(inner, media):
        return replace(feature, feature=replace(inner, decode=False))
    return feature
