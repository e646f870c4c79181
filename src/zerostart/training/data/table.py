"""Read tables of media: CSV, JSON, JSON lines, folders with texts, ``datasets``."""

from __future__ import annotations

import csv
import difflib
import io
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from zerostart.checkpoint.paths import expanded
from zerostart.distributed.world import current_world
from zerostart.errors import ConfigError
from zerostart.training.config.parsing import parse_json
from zerostart.training.data.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES, MediaFile, suggest_path
from zerostart.training.data.media_config import (
    FILE_COLUMN,
    KNOWN_COLUMNS,
    TEXT_COLUMNS,
    Column,
    ColumnConfig,
    DatasetConfig,
    Kind,
)

logger = logging.getLogger("zerostart")

Row = Mapping[str, Any]

#: Table files that a directory is searched for.
TABLES = ("metadata.csv", "metadata.json", "metadata.jsonl")
_SUFFIXES = f"pictures end with {' '.join(IMAGE_SUFFIXES)}, videos with {' '.join(VIDEO_SUFFIXES)}"
#: Prefix of a source that the library ``datasets`` loads.
_PREFIX = "hf:"
#: Files that mark a directory saved by ``datasets``.
_SAVED = ("dataset_info.json", "dataset_dict.json")
_SHOWN_NAMES = 3


@dataclass(frozen=True)
class Table:
    """Rows of cells by column name; file names in cells are relative to ``base``.

    ``where(i)`` is the place of row ``i`` for messages. Rows of ``datasets`` are read on access.
    """

    rows: Sequence[Row]
    columns: tuple[str, ...]
    base: Path
    where: Callable[[int], str]


def read_table(config: DatasetConfig) -> Table:
    """Read the first ``config.items`` rows (0: all) of ``config.source``.

    The text files of a folder become the column ``config.prompt``. Raises ConfigError, naming file and line,
    for a table that is absent, malformed or empty.
    """
    source = config.source
    path = expanded(source)
    if source.startswith(_PREFIX) or any((path / name).is_file() for name in _SAVED):
        return _read_dataset(config)
    if not path.exists():
        raise ConfigError(f"media.source {path}: no such file or directory; {suggest_path(path)}")
    tables = [path / name for name in TABLES if (path / name).is_file()]
    if len(tables) > 1:
        names = " and ".join(table.name for table in tables)
        raise ConfigError(f"media.source {source} has {names}; name the file to use")
    if path.is_dir() and not tables:
        base, rows = path, _read_folder(path, config)
    else:
        path = tables[0] if tables else path
        base, rows = path.parent, _read_rows(path)
    pairs = list(itertools.islice(rows, config.items or None))
    if not pairs:
        raise ConfigError(f"media.source {source} is empty: it has no row to train on")
    base = expanded(config.base or base)
    if not base.is_dir():
        raise ConfigError(f"media.base {base}: no such directory; {suggest_path(base)}")
    # JSON rows may have different columns.
    columns = tuple(dict.fromkeys(itertools.chain.from_iterable(row for _, row in pairs)))
    return Table([row for _, row in pairs], columns, base, [where for where, _ in pairs].__getitem__)


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
        # NUL characters, of UTF-16 without a byte order mark, must not count as text.
        return data.replace(b"\0", b"\xff").decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"media.source {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        place = error.start + len(data) - len(error.object)  # `object` lacks the byte order mark
        raise ConfigError(
            f"{path}, line {len(data[: place + 1].splitlines())}: not UTF-8 text (the byte "
            f"0x{data[place]:02x}); only UTF-8 is read, not UTF-16 or cp1252: save the file as UTF-8"
        ) from error


def _read_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield the place and the cells of each row of a table file."""
    records: Iterator[tuple[str, object]]
    match path.suffix.lower():
        case ".csv":
            records = _csv_rows(path)
        case ".json":
            rows = parse_json(_read_text(path), str(path))
            if not isinstance(rows, list):
                raise ConfigError(f"{path}: a table is a JSON list of objects, not a {type(rows).__name__}")
            records = ((f"{path}, entry {number}", row) for number, row in enumerate(rows, start=1))
        case ".jsonl":
            lines = enumerate(io.StringIO(_read_text(path)), start=1)
            places = ((f"{path}, line {number}", line) for number, line in lines if line.strip())
            records = ((where, parse_json(line, where)) for where, line in places)
        case suffix:
            raise ConfigError(f"media.source {path}: a table is a .csv, .json or .jsonl file: not {suffix!r}")
    for where, row in records:
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: a row is a JSON object of columns, not a {type(row).__name__}")
        yield where, row


def _csv_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield rows of text with their last lines; an empty cell is None."""
    text = _read_text(path)
    first = text.partition("\n")[0]
    if ";" in first and "," not in first:
        raise ConfigError(f"{path}, line 1: semicolons between the columns; save the table with commas")
    # `csv` handles line breaks itself: those within quotes stay as they are.
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        header = reader.fieldnames or ()
        if len(set(header)) < len(header):
            raise ConfigError(f"{path}: two columns have the same name: {', '.join(header)}")
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            if None in row or None in row.values():
                raise ConfigError(
                    f"{where}: not as many cells as there are columns ({len(header)}); put a text with a "
                    'comma or a line break in "quotes"'
                )
            yield where, {name: cell or None for name, cell in row.items()}
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num}: not valid CSV: {error}") from error


def _read_folder(folder: Path, config: DatasetConfig) -> Iterator[tuple[str, Row]]:
    """Yield the pictures and videos below ``folder`` with their texts, sorted by path."""
    rows: list[tuple[str, Row]] = []
    without: list[str] = []
    skipped: Counter[str] = Counter()
    for path in sorted(folder.rglob("*"), key=lambda path: path.relative_to(folder).as_posix()):
        name, text = path.relative_to(folder), path.with_suffix(".txt")
        if any(part.startswith(".") for part in name.parts) or not path.is_file():
            continue
        if (kind := _kind(path)) is None:
            skipped[path.suffix.lower() or name.name] += path != text
        elif not config.items or len(rows) < config.items:
            row = {kind: name.as_posix()}
            if config.prompt is not None and text.is_file():
                row[config.prompt] = _read_text(text).strip()
            elif config.prompt is not None:
                without.append(name.as_posix())
            rows.append((str(path), row))
    if not rows:
        raise ConfigError(
            f"media.source {folder}: no {', '.join(TABLES)}, picture or video in this directory; {_SUFFIXES}"
        )
    if without:
        raise ConfigError(
            f"media.source {folder}: {len(without)} files have no .txt of the same name with their text "
            f"({', '.join(without[:_SHOWN_NAMES])}); write them, or set media.prompt to null for a model "
            "without texts"
        )
    if (+skipped) and current_world().rank == 0:
        kinds = ", ".join(f"{count} {suffix}" for suffix, count in sorted((+skipped).items()))
        logger.warning("media.source %s: skipped: %s; %s", folder, kinds, _SUFFIXES)
    return iter(rows)


def _kind(path: Path) -> str | None:
    suffix = path.suffix.lower()
    return "image" if suffix in IMAGE_SUFFIXES else "video" if suffix in VIDEO_SUFFIXES else None


def find_files(cell: object, kind: Kind, base: Path, column: str) -> tuple[MediaFile, ...]:
    """Return the files that a cell names (relative to ``base``) or contains.

    A text that begins with ``[`` is a JSON list of names, which CSV needs for several files. Raises
    ConfigError for a cell that names no file.
    """
    where = f"column {column!r}"
    if kind != "image" and isinstance(cell, str) and cell.lstrip().startswith("["):
        cell = parse_json(cell, f"{where}: {cell!r}")
    if cell is None or cell == "":
        return ()
    if not isinstance(cell, (list, tuple)):
        return (_file(cell, base, where),)
    if kind == "image":
        raise ConfigError(f"{where}: a list of files, but its kind is image; set it to images")
    return tuple(_file(part, base, where) for part in cell)


def _file(cell: object, base: Path, where: str) -> MediaFile:
    if isinstance(cell, dict) and cell.keys() == {"bytes", "path"}:
        # A saved dataset may name a path of another machine next to the bytes.
        if cell["bytes"] is not None:
            return MediaFile(cell["path"] or where, None, cell["bytes"])
        cell = cell["path"]
    if not isinstance(cell, str) or not cell:
        raise ConfigError(f"{where}: {cell!r} is not the name of a file")
    if cell.startswith(("http://", "https://")):
        raise ConfigError(f"{where}: {cell} is a URL; download the file, and give its path")
    return MediaFile(str(base / cell), base / cell)


def find_text_column(config: DatasetConfig, columns: Sequence[str]) -> str | None:
    """Return the column of texts, or None for a model without texts.

    Raises ConfigError if it is absent. Without ``prompt`` in the configuration, ``caption`` and ``text`` are
    accepted too.
    """
    if config.prompt is None or config.prompt in columns:
        return config.prompt
    alternatives = TEXT_COLUMNS if config.prompt == DatasetConfig.model_fields["prompt"].default else ()
    for name in alternatives:
        if name in columns:
            return name
    raise _absent(config.prompt, columns, "media.prompt names the column of texts; null: there are none")


def find_media_columns(config: DatasetConfig, table: Table) -> tuple[Column, ...]:
    """Return the columns of files in ``table``; those that determine an item's size come first.

    Raises ConfigError if the table lacks a configured column or has no column of files.
    """
    columns = table.columns
    configured = config.columns or {name: name for name in KNOWN_COLUMNS if name in columns}
    if not configured and FILE_COLUMN in columns:
        # A picture among videos is a video of one frame.
        names = (row.get(FILE_COLUMN) for row in table.rows)
        videos = any(isinstance(name, str) and _kind(Path(name)) == "video" for name in names)
        configured = {"video" if videos else "image": FILE_COLUMN}
    if not configured:
        raise ConfigError(
            f"media.source {config.source}: none of its columns ({', '.join(columns)}) is one of "
            f"{', '.join(KNOWN_COLUMNS)}; name the columns of files in media.columns, such as "
            "columns: {image: file_name}"
        )
    chosen = [_column(name, value) for name, value in configured.items()]
    for column in chosen:
        if column.column not in columns:
            raise _absent(column.column, columns, f"media.columns.{column.name} names it")
    leading = {"video": 0, "image": 1}
    return tuple(sorted(chosen, key=lambda column: leading.get(column.name, 2)))


def _column(name: str, value: str | ColumnConfig) -> Column:
    config = ColumnConfig(column=value) if isinstance(value, str) else value
    kind, size = KNOWN_COLUMNS.get(name, (None, None))
    kind = config.kind or kind
    assert kind is not None, "the configuration was checked for it"
    # The pictures of a list have different shapes.
    size = config.size or size or ("own" if kind == "images" else "item")
    return Column(name, config.column or name, kind, size == "own")


def _absent(column: str, columns: Sequence[str], how: str) -> ConfigError:
    near = difflib.get_close_matches(column, columns, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    return ConfigError(f"the table of media has no column {column!r} but {', '.join(columns)} ({how}){hint}")


def _read_dataset(config: DatasetConfig) -> Table:
    """Open a dataset by the library ``datasets``; rows are read on access."""
    source, split = config.source, config.split
    try:
        import datasets

        if source.startswith(_PREFIX):
            dataset = datasets.load_dataset(source.removeprefix(_PREFIX), split=split)
        else:
            dataset = datasets.load_from_disk(str(expanded(source)))
            dataset = dataset[split] if isinstance(dataset, dict) else dataset
    except ImportError as error:
        raise ConfigError(
            f"media.source {source} is a Hugging Face dataset, but the package datasets cannot be "
            f"imported ({error}): pip install datasets"
        ) from error
    except Exception as error:  # of many types
        reason = " ".join(str(error).split())
        raise ConfigError(f"media.source {source}: cannot load the split {split!r}: {reason}") from error
    if not len(dataset):
        raise ConfigError(f"media.source {source} is empty: it has no row to train on")
    # Otherwise the library decodes every file of a row on access, by its own rules.
    for name, feature in dataset.features.items():
        dataset = dataset.cast_column(name, _undecoded(feature, datasets))
    rows = dataset.select(range(min(config.items, len(dataset)))) if config.items else dataset
    where = partial("{0}, row {2} of {1}".format, source, split)
    return Table(rows, tuple(dataset.features), expanded(config.base or "."), where)


def _undecoded(feature: Any, datasets: Any) -> Any:
    media = tuple(getattr(datasets, name) for name in ("Image", "Video") if hasattr(datasets, name))
    if isinstance(feature, media):
        return replace(feature, decode=False)
    inner = getattr(feature, "feature", None)  # of a list
    if isinstance(inner, media):
        return replace(feature, feature=replace(inner, decode=False))
    return feature
