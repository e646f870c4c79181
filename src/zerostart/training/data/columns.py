"""Which columns of a table name files, and what they are called in an item."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from zerostart.errors import ConfigError
from zerostart.training.data.media_config import KNOWN_COLUMNS, ColumnConfig, Kind, MediaConfig


@dataclass(frozen=True)
class Column:
    """``column`` of the table, ``name`` in the items; ``own``: each picture has a size for itself."""

    name: str
    column: str
    kind: Kind
    own: bool


def media_columns(config: MediaConfig, columns: Sequence[str]) -> tuple[Column, ...]:
    """What ``config`` makes of a table with ``columns``; those that give an item its size come first.

    Raises :class:`ConfigError` where the table lacks one that is named, or has none with files at all.
    """
    if config.prompt is not None and config.prompt not in columns:
        raise _absent(config.prompt, columns, "media.prompt names the column of texts; null: there are none")
    given = config.columns or {name: name for name in KNOWN_COLUMNS if name in columns}
    if not given:
        raise ConfigError(
            f"media.source {config.source}: none of its columns ({', '.join(columns)}) is one of "
            f"{', '.join(KNOWN_COLUMNS)}; media.columns says which name files, such as "
            "columns: {image: file_name}"
        )
    found = [_column(name, value) for name, value in given.items()]
    for column in found:
        if column.column not in columns:
            raise _absent(column.column, columns, f"media.columns.{column.name} names it")
    leading = [name for name in KNOWN_COLUMNS if name in ("video", "image")]
    found.sort(key=lambda column: leading.index(column.name) if column.name in leading else len(leading))
    return tuple(found)


def _column(name: str, value: str | ColumnConfig) -> Column:
    given = ColumnConfig(column=value) if isinstance(value, str) else value
    kind, size = KNOWN_COLUMNS.get(name, (None, None))
    kind = given.kind or kind
    assert kind is not None, "the configuration was checked for it"
    return Column(
        name,
        given.column or name,
        kind,
        (given.size or size or ("own" if kind == "images" else "item")) == "own",
    )


def _absent(column: str, columns: Sequence[str], how: str) -> ConfigError:
    near = difflib.get_close_matches(column, columns, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    return ConfigError(f"the table of media has no column {column!r} but {', '.join(columns)} ({how}){hint}")
