"""Directories that the ranks of a training job wrote, and their catalogs.

A format of such directories is a ``TrainingFormat``. The model in it loads like any other checkpoint, and
``load_state`` continues from its optimizer.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

from zerostart import geometry
from zerostart.checkpoint.catalog import DTYPE_BITS, Assembled, Catalog, TensorEntry
from zerostart.checkpoint.formats.base import CONFIG_NAME, Format, formats
from zerostart.checkpoint.formats.inert_pickle import MAX_DIMENSIONS, StoredTensor
from zerostart.checkpoint.formats.torch_zip import TorchArchive
from zerostart.checkpoint.formats.weights import has_weights
from zerostart.checkpoint.storage import Storage
from zerostart.checkpoint.storage.base import HeaderBytes
from zerostart.checkpoint.storage.files import FileState, open_regular, read_small
from zerostart.checkpoint.storage.local import LocalFiles
from zerostart.checkpoint.strict_json import DAMAGED, shown
from zerostart.errors import CheckpointError, CheckpointNotFoundError, ReadError, ZerostartError
from zerostart.geometry import Piece

#: Separator between the names of an optimizer state and its parameter in ``assembled``.
STATE = ":"


@dataclass(frozen=True)
class ParameterGroup:
    """Settings and parameter names of an optimizer group."""

    settings: dict[str, Any]
    parameters: tuple[str, ...]


@dataclass
class TrainingContents:
    """Content of a training checkpoint."""

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    #: Weights by name, and optimizer states as ``exp_avg:NAME`` and the like.
    assembled: dict[str, Assembled] = field(default_factory=dict)
    #: Scalar states, by key and parameter.
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)
    groups: list[ParameterGroup] = field(default_factory=list)
    #: Counters of the engine, by its own names.
    engine: dict[str, Any] = field(default_factory=dict)
    #: State of the learning rate schedule; None if none was saved.
    schedule: dict[str, Any] | None = None
    #: Tied weights: name, and the name under which they are stored.
    ties: dict[str, str] = field(default_factory=dict)

    def add(self, entries: Iterable[TensorEntry]) -> None:
        """Add stored tensors."""
        self.tensors.update((entry.name, entry) for entry in entries)


def is_shape(value: Any) -> TypeGuard[tuple[int, ...]]:
    """Return True if a pickled value is a shape."""
    few = type(value) is tuple and len(value) <= MAX_DIMENSIONS  # a hostile pickle may share one of millions
    return few and all(type(size) is int and size >= 0 for size in value)


def names_of(value: Any) -> tuple[str, ...]:
    """Return pickled names; a number is a name too.

    Raises CheckpointError for anything else.
    """
    if type(value) not in (list, tuple) or any(type(name) not in (str, int) for name in value):
        raise CheckpointError(f"the parameters of an optimizer group have no names: {DAMAGED}")
    return tuple(map(str, value))


def from_runs(
    name: str, shape: Sequence[int], dtype: str, runs: Iterable[tuple[TensorEntry, int, int]]
) -> Assembled:
    """Assemble a tensor from runs of stored rows.

    ``runs`` are in row-major order. A run is the stored tensor (1-D), its first element, and the number
    of elements. The end of the last run may be padding. Raises CheckpointError if the runs are too short.
    """
    total = prod(shape)
    parts: list[tuple[tuple[Piece, ...], int]] = []
    have = 0
    for entry, first, count in runs:
        # The last run may continue with padding, or with the next parameter of a flat buffer.
        count = min(count, total - have)
        if count > 0:
            _check_dtype(name, dtype, entry)
            # Before the piece is built: a truncated file is reported here, not in the middle of a read.
            if first + count > entry.numel:
                raise CheckpointError(
                    f"tensor {shown(name)} needs {first + count} elements of {shown(entry.name)}, which has "
                    f"{entry.numel}: the file is truncated, or belongs to another job"
                )
            if entry.strides is not None:
                raise CheckpointError(
                    f"tensor {shown(name)}: {shown(entry.name)} is not stored as one contiguous row, and is "
                    "not read: the file was not written as this format is"
                )
            stored = geometry.whole(entry.name, (entry.numel,))
            parts.append((geometry.crop(stored, 0, first, first + count), count))
            have += count
    if have < total:
        raise CheckpointError(
            f"tensor {shown(name)} has {total} elements, but the files hold {have} of them: a file is "
            "missing, or the files were written by another number of ranks"
        )
    flat = geometry.concatenate(parts, 0)
    return Assembled(name, dtype, tuple(shape), geometry.reshape(flat, (total,), shape))


def from_boxes(
    name: str, shape: Sequence[int], dtype: str, boxes: Iterable[tuple[TensorEntry, Sequence[int]]]
) -> Assembled:
    """Assemble a tensor from stored boxes.

    Boxes have origins; ``check_whole`` checks the tiling. Raises CheckpointError for a box of another
    type.
    """
    pieces: list[Piece] = []
    for entry, origin in boxes:
        _check_dtype(name, dtype, entry)
        part = geometry.whole(entry.name, entry.shape, entry.strides)
        for dim, at in enumerate(origin):
            part = geometry.shift(part, dim, at)
        pieces += part
    return Assembled(name, dtype, tuple(shape), tuple(pieces))


def _check_dtype(name: str, dtype: str, entry: TensorEntry) -> None:
    if entry.dtype != dtype or dtype not in DTYPE_BITS:
        raise CheckpointError(
            f"tensor {shown(name)} is {dtype}, but a part of it is stored as {entry.dtype}: files of "
            "two jobs are mixed, or one is damaged"
        )


#: Maximum number of pairs of pieces of one tensor that are compared.
_MOST_PAIRS = 1 << 22


# Uninitialised memory must never become weights, however a reader errs about a damaged directory.
def check_whole(assembled: Mapping[str, Assembled]) -> None:
    """Raise CheckpointError unless pieces tile their tensors."""
    for tensor in assembled.values():
        shape, name = tensor.shape, shown(tensor.name)
        for piece in tensor.pieces:
            sizes = zip(piece.origin, piece.extent, shape, strict=True)
            if any(at < 0 or at + count > size for at, count, size in sizes):
                raise CheckpointError(
                    f"tensor {name} of shape {list(shape)} has a part that lies outside that shape"
                )
        # The right number of elements without overlaps covers every element.
        have = sum(piece.numel for piece in tensor.pieces)
        if have != prod(shape):
            raise CheckpointError(
                f"tensor {name} has {prod(shape)} elements, but the files hold {have}: a file is missing, "
                "is there twice, or belongs to another job"
            )
        if len(tensor.pieces) > 1 and not _are_disjoint(tensor.pieces):
            raise CheckpointError(
                f"two parts of tensor {name} fill the same elements, and other elements stay empty: the "
                "files belong to two jobs, or are damaged"
            )


def _are_disjoint(pieces: Sequence[Piece]) -> bool:
    """Return True if no two pieces overlap."""
    # Sorted by the first dimension, so that a box is compared only with those that begin before its end.
    boxes = sorted((piece.origin, piece.extent) for piece in pieces)
    pairs = 0
    for number, (origin, extent) in enumerate(boxes):
        for other, size in itertools.islice(boxes, number + 1, None):
            if origin and other[0] >= origin[0] + extent[0]:
                break
            pairs += 1
            if pairs > _MOST_PAIRS:  # a hostile directory may hold millions of boxes
                return False
            if all(a < b + m and b < a + n for a, n, b, m in zip(origin, extent, other, size, strict=True)):
                return False
    return True


#: accelerate's folders for a sharded model's weights, and for FSDP2's optimizer.
_ACCELERATE, _OPTIMIZER = ("pytorch_model_fsdp_0", "pytorch_model"), "optimizer_0"
#: Files with the name of the newest checkpoint of a DeepSpeed directory.
_LATEST = ("latest", "latest_universal")
#: Maximum number of directories that refer to the next one.
_DEEPEST = 8


#: ``struct`` format of each number type.
_NUMBERS = {"F32": "<f", "F64": "<d", "I64": "<q", "I32": "<i"}
#: Function that returns the entry of a pickled tensor under a name.
Placing = Callable[[str, StoredTensor], TensorEntry]


class PartFiles:
    """Files of a training checkpoint, numbered for the entries.

    ``reading`` is the last opened file, for messages.
    """

    def __init__(self) -> None:
        self.paths: list[str] = []
        self._states: list[FileState] = []
        self.reading = ""

    def storage(self) -> Storage:
        """Return the storage of the files. Raises ReadError."""
        return LocalFiles.known(self.paths, self._states)

    @contextlib.contextmanager
    def opened(self, path: Path) -> Iterator[tuple[HeaderBytes, int, int]]:
        """Open a file: its bytes, size and number.

        Raises ReadError if the file changes meanwhile.
        """
        self.reading = str(path)
        number = len(self.paths)
        # Compared at the end, since a file that changes while it is read may be a mixture.
        before = FileState.at(str(path))
        with open_regular(str(path), "training") as (handle, size):
            yield handle, size, number
        if before is None or FileState.at(str(path)) != before:
            raise ReadError(
                f"{path} was changed while it was read; load again when no other process writes to it"
            )
        self.paths.append(str(path))
        self._states.append(before)

    def number(self, entry: TensorEntry) -> float:
        """Read the value of a one-element tensor.

        Raises CheckpointError for another type.
        """
        form = _NUMBERS.get(entry.dtype)
        self.reading = self.paths[entry.file]
        if form is None or entry.numel != 1:
            raise CheckpointError(f"{self.reading}: {shown(entry.name)} is not a number")
        length = struct.calcsize(form)
        with open_regular(self.reading, "training") as (handle, _):
            return float(struct.unpack(form, handle.read(length, entry.offset))[0])

    def settings(self, values: Mapping[Any, Any], place: Placing) -> dict[str, Any]:
        """Return group settings; scalar tensors become numbers."""
        settings = {}
        for key, value in values.items():
            if type(value) is StoredTensor and value.shape == ():
                entry = place(str(key), value)
                value = self.number(entry) if entry.dtype in _NUMBERS else None
            settings[str(key)] = value
        return settings

    def torch_file(self, path: Path) -> tuple[object, Placing]:
        """Return a torch file's content, and its tensor locator."""
        with self.opened(path) as (handle, size, number):
            archive = TorchArchive(handle, size, str(path))
            value = archive.value()

        def place(name: str, tensor: StoredTensor) -> TensorEntry:
            self.reading = str(path)
            return archive.entry(name, tensor, number)

        return value, place


class TrainingFormat(Format):
    """Format of directories with the shards of ranks."""

    @abstractmethod
    def holds(self, directory: Path) -> bool:
        """Return True if ``directory`` has files of ranks."""

    @abstractmethod
    def read(self, directory: Path, files: PartFiles) -> TrainingContents:
        """Read the files of all ranks.

        ``files`` records each file. Raises CheckpointError and CheckpointNotFoundError if they are
        incomplete, ReadError if reading fails.
        """

    def recognises(self, path: Path) -> bool:
        """Return True if ``path`` leads to such files.

        Whole weights in ``path`` take precedence.
        """
        if not path.is_dir() or has_weights(path):
            return False
        # Only names and small files are read here, no pickle.
        with _damage_named(path, PartFiles()):
            located = _locate(path)
        return located is not None and located[1] is self

    def describe(self, path: Path, classes: Collection[str]) -> Catalog:
        """Return the catalog of the weights only."""
        files = PartFiles()
        with _damage_named(path, files):
            located = _locate(path)
            if located is None:
                raise CheckpointNotFoundError(f"{path}: the checkpoint was removed while it was opened")
            contents = _read(*located, files)
            return _catalog(contents, files, _weights(contents), _root(path, located[0]))


def _weights(contents: TrainingContents) -> dict[str, Assembled]:
    return {name: tensor for name, tensor in contents.assembled.items() if STATE not in name}


def training_states(directory: Path) -> tuple[TrainingContents, Catalog, Catalog] | None:
    """Return contents and catalogs of weights and optimizer states.

    In the second catalog a state has the name ``optimizer/KEY/NAME``. None for another directory. Raises
    CheckpointError and CheckpointNotFoundError if files are incomplete, ReadError if reading fails.
    """
    files = PartFiles()
    with _damage_named(directory, files):
        located = _locate(directory)
        if located is None:
            return None
        contents = _read(*located, files)
        # accelerate saves FSDP2's optimizer in a folder next to that of the weights.
        optimizer_folder = located[0].parent / _OPTIMIZER
        if located[0].name == _ACCELERATE[0] and (format_ := _held_by(optimizer_folder)) is not None:
            optimizer = _read(optimizer_folder, format_, files)
            contents.add(optimizer.tensors.values())
            contents.assembled |= optimizer.assembled
            contents.numbers, contents.groups = optimizer.numbers, optimizer.groups
        states = {}
        for name, tensor in contents.assembled.items():
            key, separator, parameter = name.partition(STATE)
            if separator:
                states[f"optimizer/{key}/{parameter}"] = tensor
        model = _catalog(contents, files, _weights(contents), _root(directory, located[0]))
        return contents, model, _catalog(contents, files, states, model.root, model.storage)


def stock_time(directory: Path) -> tuple[Path, float] | None:
    """Return path and newest file time of such a checkpoint.

    The time is in seconds; None if ``directory`` has none. Raises the errors of the search.
    """
    located = _locate(directory)
    if located is None:
        return None
    place = located[0]
    files = (entry for entry in place.iterdir() if entry.suffix != ".json" and entry.is_file())
    return place, max((entry.stat().st_mtime for entry in files), default=place.stat().st_mtime)


def _read(place: Path, format_: TrainingFormat, files: PartFiles) -> TrainingContents:
    contents = format_.read(place, files)
    # Later errors concern the directory, not one file.
    files.reading = str(place)
    check_whole(contents.assembled)
    return contents


@contextlib.contextmanager
def _damage_named(directory: Path, files: PartFiles) -> Iterator[None]:
    """Convert errors of damaged files to a named CheckpointError."""
    try:
        yield
    except ZerostartError as error:
        if str(directory) in str(error) or not isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{files.reading or directory}: {error}") from error
    except OSError as error:
        raise ReadError(f"{files.reading or directory}: cannot be read: {error.strerror}") from error
    except Exception as error:  # damage leads to any error
        raise CheckpointError(
            f"{files.reading or directory}: what it says makes no sense "
            f"({type(error).__name__}: {shown(str(error))}): {DAMAGED}"
        ) from error


def _catalog(
    contents: TrainingContents,
    files: PartFiles,
    tensors: dict[str, Assembled],
    root: str,
    storage: Storage | None = None,
) -> Catalog:
    parts = {source for tensor in tensors.values() for piece in tensor.pieces for source in piece.source}
    stored = {name: entry for name, entry in contents.tensors.items() if name in parts}
    storage = files.storage() if storage is None else storage
    return Catalog(root, storage, stored, {"format": "pt"}, assembled=tensors)


def _held_by(directory: Path) -> TrainingFormat | None:
    if not directory.is_dir():
        return None
    training = (format_ for format_ in formats() if isinstance(format_, TrainingFormat))
    return next((one for one in training if one.holds(directory)), None)


def _locate(directory: Path, depth: int = 0) -> tuple[Path, TrainingFormat] | None:
    # Files with folder names may refer to each other.
    if depth > _DEEPEST:
        raise CheckpointError(
            f"{directory}: the checkpoint's directories refer to each other in a circle: {DAMAGED}"
        )
    if (format_ := _held_by(directory)) is not None:
        return directory, format_
    for name in _LATEST:
        if (directory / name).is_file():
            tag = read_small(str(directory / name)).decode("utf-8", "replace").strip()
            # The name may be hostile: it must not lead out of the directory.
            if not tag or "/" in tag or "\\" in tag or "\0" in tag or tag in (".", ".."):
                raise CheckpointError(
                    f"{directory / name}: names {shown(tag)}, which is not a folder beside this file"
                )
            if not (directory / tag).is_dir():
                raise CheckpointNotFoundError(f"{directory / tag}: does not exist, but {name} names it")
            return _locate(directory / tag, depth + 1)
    for name in _ACCELERATE:
        if (directory / name).is_dir() and (inner := _locate(directory / name, depth + 1)) is not None:
            return inner
    return None


def _root(directory: Path, located: Path) -> str:
    """Find the directory with the config file."""
    places = [directory, located, *located.parents[:2]]
    return str(next((place for place in places if (place / CONFIG_NAME).is_file()), directory))
