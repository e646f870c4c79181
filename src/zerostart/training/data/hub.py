"""Tables out of Hugging Face ``datasets``, where that library is installed; their media are decoded here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, overload

from zerostart.checkpoint.paths import expanded
from zerostart.errors import ConfigError
from zerostart.training.data.table import Table

_PREFIX = "hf:"


def is_dataset(source: str) -> bool:
    """Whether ``source`` is ``hf:NAME``, or a directory that ``datasets`` saved."""
    path = expanded(source)
    saved = (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    return source.startswith(_PREFIX) or saved or (path / "dataset_dict.json").is_file()


def read_dataset(source: str, split: str, base: str | None, items: int) -> Table:
    """The first ``items`` rows (0: all) of a split, read when they are asked for.

    Raises :class:`ConfigError` where the library, the dataset or the split is absent.
    """
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"media.source {source} is a dataset of Hugging Face, and datasets cannot be imported ({error}): "
            "pip install datasets"
        ) from error
    try:
        if source.startswith(_PREFIX):
            found = datasets.load_dataset(source.removeprefix(_PREFIX), split=split)
        else:
            found = datasets.load_from_disk(str(expanded(source)))
    except Exception as error:  # of many types
        told = " ".join(str(error).split())
        raise ConfigError(
            f"media.source {source}: no split {split!r} to be loaded from it: {told}"
        ) from error
    if isinstance(found, dict):
        if split not in found:
            raise ConfigError(
                f"media.source {source} has no split {split!r}; media.split is one of {', '.join(found)}"
            )
        found = found[split]
    if not len(found):
        raise ConfigError(f"media.source {source} is empty: it has no row to train on")
    for name, feature in found.features.items():
        found = found.cast_column(name, _undecoded(feature, datasets))
    rows = _Rows(found, min(items, len(found)) if items else len(found))
    base_path = expanded(base or ".")
    return Table(rows, tuple(found.features), base_path, partial(_place, source, split))


def _place(source: str, split: str, index: int) -> str:
    return f"{source}, row {index} of {split}"


def _undecoded(feature: Any, datasets: Any) -> Any:
    """``feature`` with the bytes or the path of its media in the place of what the library makes of them."""
    media = tuple(getattr(datasets, name) for name in ("Image", "Video") if hasattr(datasets, name))
    if isinstance(feature, media):
        return replace(feature, decode=False)
    inner = getattr(feature, "feature", None)  # of a list
    if isinstance(inner, media):
        return replace(feature, feature=replace(inner, decode=False))
    return feature


class _Rows(Sequence[Mapping[str, Any]]):
    def __init__(self, found: Any, count: int) -> None:
        self._found = found
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self._count))]
        row: dict[str, Any] = self._found[index]
        return row
