"""What zerostart asks of a format in which checkpoints lie on disk, and the table of formats.

An outsider's format is a subclass of ``Format``, registered by name (``register_format``, or the entry point
group ``zerostart.formats``); ``zerostart.testing.FormatConformance`` is what it has to pass.
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

#: Entry points of other packages: a name, and the subclass of ``Format``.
GROUP = "zerostart.formats"
#: The configuration of a model, beside its weights.
CONFIG_NAME = "config.json"
#: The folder with the model in a directory of ``save_state``.
MODEL_FOLDER = "model"
#: How often a checkpoint is opened that a save replaces meanwhile.
TRIES = 3


class Format(ABC):
    """One way in which a checkpoint lies in a local directory or file."""

    #: The name under which it is registered.
    name: ClassVar[str]

    @abstractmethod
    def recognises(self, path: Path) -> bool:
        """Whether the directory or file ``path``, which is there, is a checkpoint of this format.

        Asked of each format in turn until one says so: it looks at names and first bytes, and reads no
        tensors. Raises CheckpointError where it is one that nobody can open.
        """

    @abstractmethod
    def describe(self, path: Path, classes: Collection[str]) -> Catalog:
        """The catalog of a checkpoint that the format has recognised, every field of its headers checked.

        Where several models lie in ``path``, the one whose class is among ``classes`` is meant. Raises
        CheckpointError for what is damaged, CheckpointNotFoundError for a file that is missing, ReadError if
        reading fails or somebody writes to a file meanwhile.
        """


#: Names, and where the class is, in the order in which they are asked. What zerostart wrote goes before what
#: others left beside it. Files of weights take what is left: their errors say what is wrong with a path.
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
    """Register ``kind``, which is asked before zerostart's own formats; also a decorator.

    Raises ConfigError for a name that another format has, zerostart's own, registered or installed.
    """
    registered = _registered.get(kind.name)
    package = kind.__module__.partition(".")[0]
    installed = entry_points(group=GROUP, name=kind.name)
    others = any(point.module.partition(".")[0] != package for point in installed)
    if others or kind.name in _OWN or (registered is not None and type(registered) is not kind):
        raise ConfigError(f"a format named {kind.name!r} is already registered; choose another name")
    if registered is None:
        _registered[kind.name] = kind()
    return kind


def formats() -> tuple[Format, ...]:
    """All formats, in the order in which they are asked.

    Raises ConfigError for one of another package that cannot be imported.
    """
    return (*_registered.values(), *_installed(), *_own())


def format_of(path: Path) -> Format:
    """The format of the checkpoint at ``path``. Raises as ``formats`` and ``Format.recognises`` do."""
    return next(format_ for format_ in formats() if format_.recognises(path))


def catalog_at(path: Path, classes: Collection[str] = ()) -> Catalog:
    """The catalog of the checkpoint at the absolute ``path``, by the format that recognises it.

    The weights and the configuration beside them are those of one save. Raises as ``Format.describe`` does.
    """
    # A state's model lies in a folder of it, whose save is switched for itself.
    folders = (path, path.parent) if path.is_dir() else (path.parent,)
    for _ in range(TRIES):
        for folder in folders:
            finish_switched(folder)
        before = _configurations(path)
        catalog = format_of(path).describe(path, classes)
        for folder in folders:  # a save may have made its switch since: its configuration is waited for
            finish_switched(folder)
        if _configurations(path) == before:
            break
    return replace(catalog, configured=catalog.configured or before.get(catalog.root))


def _configurations(path: Path) -> dict[str, FileState | None]:
    places = (path, path / MODEL_FOLDER) if path.is_dir() else (path.parent,)
    return {str(place): FileState.at(str(place / CONFIG_NAME)) for place in places}


@functools.cache
def _own() -> tuple[Format, ...]:
    # Imported when the first checkpoint is opened: the formats themselves import this module.
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
