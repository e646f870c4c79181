"""A small stand-in for `datasets`: columns of Python lists, and reading of text and JSON lines."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import utils

__all__ = ["Dataset", "DatasetDict", "IterableDataset", "IterableDatasetDict", "load_dataset", "utils"]

__version__ = "99.0.0"


class IterableDataset:
    """For ``isinstance``; there are none."""


class IterableDatasetDict(dict[str, Any]):
    """For ``isinstance``; there are none."""


class Dataset:
    """Rows of named columns."""

    # What a model card would say of the data.
    builder_name = "text"
    config_name = "default"
    split = None

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        self._columns = {name: list(values) for name, values in columns.items()}

    @classmethod
    def from_dict(cls, columns: Mapping[str, Sequence[Any]], *_: Any, **__: Any) -> Dataset:
        return cls(columns)

    @classmethod
    def from_list(cls, rows: Sequence[Mapping[str, Any]], *_: Any, **__: Any) -> Dataset:
        return cls({name: [row.get(name) for row in rows] for name in (rows[0] if rows else ())})

    @property
    def column_names(self) -> list[str]:
        return list(self._columns)

    @property
    def features(self) -> dict[str, Any]:
        return dict.fromkeys(self._columns)

    @property
    def format(self) -> dict[str, Any]:
        return {"type": None, "format_kwargs": {}, "columns": self.column_names, "output_all_columns": False}

    def set_format(self, **_: Any) -> None:
        """Rows are always Python values."""

    def __len__(self) -> int:
        return len(next(iter(self._columns.values()), []))

    num_rows = property(__len__)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._columns[key]
        if isinstance(key, slice):
            return {name: values[key] for name, values in self._columns.items()}
        return {name: values[key] for name, values in self._columns.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def map(
        self,
        function: Callable[..., Any],
        batched: bool = False,
        batch_size: int = 1000,
        remove_columns: str | Sequence[str] = (),
        fn_kwargs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> Dataset:
        removed = {remove_columns} if isinstance(remove_columns, str) else set(remove_columns or ())
        if not batched:
            rows = []
            for row in self:
                made = function(row, **(fn_kwargs or {}))
                kept = {name: value for name, value in row.items() if name not in removed}
                rows.append({**kept, **dict(made)})
            return Dataset.from_list(rows)
        columns: dict[str, list[Any]] = {}
        for start in range(0, len(self), batch_size):
            batch = self[start : start + batch_size]
            made = dict(function(batch, **(fn_kwargs or {})))
            kept = {name: values for name, values in batch.items() if name not in removed}
            for name, values in {**kept, **made}.items():
                columns.setdefault(name, []).extend(values)
        return Dataset(columns)

    def filter(self, function: Callable[..., bool], **_: Any) -> Dataset:
        return self.select([index for index, row in enumerate(self) if function(row)])

    def select(self, indices: Sequence[int]) -> Dataset:
        return Dataset({name: [values[i] for i in indices] for name, values in self._columns.items()})

    def select_columns(self, names: Sequence[str]) -> Dataset:
        return Dataset({name: self._columns[name] for name in self._columns if name in set(names)})

    def remove_columns(self, names: str | Sequence[str]) -> Dataset:
        gone = {names} if isinstance(names, str) else set(names)
        return self.select_columns([name for name in self._columns if name not in gone])

    def add_column(self, name: str, values: Sequence[Any], *_: Any, **__: Any) -> Dataset:
        return Dataset({**self._columns, name: values})

    def rename_column(self, old: str, new: str) -> Dataset:
        return Dataset({new if name == old else name: v for name, v in self._columns.items()})

    def shuffle(self, seed: int | None = None, **_: Any) -> Dataset:
        return self.select(random.Random(seed).sample(range(len(self)), len(self)))


class DatasetDict(dict[str, Dataset]):
    """Splits by name."""

    @property
    def column_names(self) -> dict[str, list[str]]:
        return {name: split.column_names for name, split in self.items()}

    def map(self, function: Callable[..., Any], **options: Any) -> DatasetDict:
        return DatasetDict({name: split.map(function, **options) for name, split in self.items()})


def load_dataset(
    path: str,
    name: str | None = None,
    data_files: Mapping[str, str] | None = None,
    split: str | None = None,
    **_: Any,
) -> Any:
    """Splits of text (``"text"``) or JSON lines (``"json"``, or a directory of ``<split>.jsonl``)."""
    if data_files is None:
        found = {file.stem: str(file) for file in sorted(Path(path).glob("*.jsonl"))}
    else:
        found = dict(data_files)
    splits = DatasetDict({key: _read(file, path == "text") for key, file in found.items()})
    if split is None:
        return splits
    part = re.fullmatch(r"(\w+)(?:\[(\d*)%?:(\d*)%?\])?", split)
    assert part is not None, split
    whole = splits[part[1]]
    low, high = int(part[2] or 0), int(part[3] or 100)
    return whole.select(range(len(whole) * low // 100, len(whole) * high // 100))


def _read(file: str, text: bool) -> Dataset:
    lines = Path(file).read_text().splitlines()
    return Dataset({"text": lines}) if text else Dataset.from_list([json.loads(line) for line in lines])
