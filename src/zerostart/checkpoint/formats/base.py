"""Format protocol of checkpoints on disk, and the table of formats.

Other packages register a subclass of ``Format`` (``register_format``, or the entry point group
``zerostart.formats``); it must pass ``zerostart.testing.FormatConformance``.
"""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import ClassVar

from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.storage.files import FileState
from zerostart.checkpoint.write.staging import finish_switched
from zerostart.errors import ConfigError

#: Entry point group of other packages: name and subclass of ``Format``.
GROUP = "zerostart.formats"
#: Config file of a model, next to its weights.
CONFIG_NAME = "config.json"
#: Folder of the model in a directory of ``save_state``.
MODEL_FOLDER = "model"
#: Attempts to open a checkpoint that a save replaces meanwhile.
TRIES = 3


class Format(ABC):
    """Checkpoint format of a local directory or file."""

    #: Name in the table of formats.
    name: ClassVar[str]

    @abstractmethod
    def recognises(self, path: Path) -> bool:
        """Return True if ``path`` has this format.

        The formats are asked in turn until one agrees. It looks at names and first bytes, and reads
        no tensors. Raises CheckpointError for a checkpoint that nobody can open.
        """

    @abstractmethod
    def describe(self, path: Path, classes: Collection[str]) -> Catalog:
        """Return the catalog of a recognised checkpoint.

        If ``path`` has several models, ``classes`` selects one. Raises CheckpointError for damage,
        CheckpointNotFoundError for a missing file, ReadError if reading fails or a file changes
        meanwhile.
        """


#: Modules and classes of zerostart's formats, in the order in which they are tried. zerostart's own files
#: precede those of other libraries. Weights files are last: their errors explain any other path.
_OWN = {
    "state": ("zerostart.checkpoint.formats.saved_state", "SavedState"),
    "pipeline": ("zerostart.checkpoint.formats.pipeline", "Pipeline"),
    "dcp": ("zerostart.checkpoint.formats.dcp", "TorchDistributed"),
    "universal": ("zerostart.checkpoint.formats.zero", "Universal"),
    "zero": ("zerostart.checkpoint.formats.zero", "Zero"),
    "weights": ("zerostart.checkpoint.formats.weights", "Weights"),
}
_registered: dict[str, Format] = {}


def register_format(kind: type[Format]) -> type[Format]:
    """Register ``kind`` before zerostart's own formats; also a decorator.

    Raises ConfigError for a name that a registered, installed or own format has.
    """
    registered = _registered.get(kind.name)
    package = kind.__module__.partition(".")[0]
    installed = entry_points(group=GROUP, name=kind.name)
    is_taken = any(point.module.partition(".")[0] != package for point in installed)
    if is_taken or kind.name in _OWN or (registered is not None and type(registered) is not kind):
        raise ConfigError(f"a format named {kind.name!r} is already registered; choose another name")
    if registered is None:
        _registered[kind.name] = kind()
    return kind


def formats() -> tuple[Format, ...]:
    """Return all formats in the order of trial.

    Raises ConfigError for a format of another package that cannot be imported.
    """
    return (*_registered.values(), *_installed(), *_own())


def format_of(path: Path) -> Format:
    """Return the format of the checkpoint at ``path``.

    Raises as ``formats`` and ``Format.recognises`` do.
    """
    return next(format_ for format_ in formats() if format_.recognises(path))


def catalog_at(path: Path, classes: Collection[str] = ()) -> Catalog:
    """Return the catalog at the absolute ``path``.

    Weights and config file are those of one save. Raises as ``Format.describe`` does.
    """
    # The model of a training state is saved as a separate folder.
    folders = (path, path.parent) if path.is_dir() else (path.parent,)
    for _ in range(TRIES):
        for folder in folders:
            finish_switched(folder)
        before = _configurations(path)
        catalog = format_of(path).describe(path, classes)
        for folder in folders:  # a save may have switched since: wait for its config file
            finish_switched(folder)
        if _configurations(path) == before:
            break
    return replace(catalog, configured=catalog.configured or before.get(catalog.root))


def _configurations(path: Path) -> dict[str, FileState | None]:
    places = (path, path / MODEL_FOLDER) if path.is_dir() else (path.parent,)
    return {str(place): FileState.at(str(place / CONFIG_NAME)) for place in places}


@functools.cache
def _own() -> tuple[Format, ...]:
    # Imported when the first checkpoint is opened, since the formats import this module.
    return tuple(getattr(importlib.import_module(module), name)() for module, name in _OWN.values())


@functools.cache
def _installed() -> tuple[Format, ...]:
    return tuple(map(_loaded, entry_points(group=GROUP)))


def _loaded(point: EntryPoint) -> Format:
    try:
        format_: Format = point.load()()
    except Exception as error:
        raise ConfigError(
            f"the format {point.name} ({point.value}) of another installed package cannot be imported: "
            f"{type(error).__name__}: {error}; repair that package, or uninstall it"
        ) from error
    return format_
