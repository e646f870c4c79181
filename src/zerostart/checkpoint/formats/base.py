"""Format protocol of checkpoints on disk, and the table of formats.

Other packages register a subclass of ``Format`` (``register_format``, or the entry point group
``zerostart.formats``); it must pass ``zerostart.testing.FormatConformance``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.storage.files import FileState
from zerostart.checkpoint.write.staging import finish_switched
from zerostart.upstream.registry import Registry

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
_registry = Registry[Format]("a format", GROUP, _OWN)


def register_format(kind: type[Format]) -> type[Format]:
    """Register ``kind`` before zerostart's own formats; also a decorator.

    Raises ConfigError for a name that a registered, installed or own format has.
    """
    return _registry.register(kind)


def formats() -> list[Format]:
    """Return all formats in the order of trial.

    Raises ConfigError for a format of another package that cannot be imported.
    """
    return _registry.instances()


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
