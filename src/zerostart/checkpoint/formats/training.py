"""Directories that the ranks of a training job wrote: what holds their shares, and the catalogs of these.

A format of such directories is a ``TrainingFormat``: the model in it is loaded like any other checkpoint, and
``load_state`` goes on from its optimizer.
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

#: What separates the name of an optimizer's state from that of its parameter in ``assembled``.
STATE = ":"


@dataclass(frozen=True)
class ParameterGroup:
    """One parameter group of an optimizer: its ``settings`` as they were pickled, and its parameters."""

    settings: dict[str, Any]
    parameters: tuple[str, ...]


@dataclass
class TrainingContents:
    """Stored tensors, what they make up, and what is no tensor."""

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    #: Weights by their names, and states of an optimizer as ``exp_avg:NAME`` and the like.
    assembled: dict[str, Assembled] = field(default_factory=dict)
    #: States that are one number, by key and parameter.
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)
    groups: list[ParameterGroup] = field(default_factory=list)
    #: Counters of the engine, by its own names.
    engine: dict[str, Any] = field(default_factory=dict)
    #: State of the schedule of learning rates; None where none was saved.
    schedule: dict[str, Any] | None = None
    #: Other names of weights, and the names that they are stored under.
    ties: dict[str, str] = field(default_factory=dict)

    def add(self, entries: Iterable[TensorEntry]) -> None:
        """Note stored tensors."""
        self.tensors.update((entry.name, entry) for entry in entries)


def is_shape(value: Any) -> TypeGuard[tuple[int, ...]]:
    """Whether what a pickle holds is the sizes of a tensor."""
    few = type(value) is tuple and len(value) <= MAX_DIMENSIONS  # one of millions may be that of each box
    return few and all(type(size) is int and size >= 0 for size in value)


def names_of(value: Any) -> tuple[str, ...]:
    """Names out of a pickle; a number is one as well. Raises CheckpointError for anything else."""
    if type(value) not in (list, tuple) or any(type(name) not in (str, int) for name in value):
        raise CheckpointError(f"the parameters of an optimizer group have no names: {DAMAGED}")
    return tuple(map(str, value))


def from_runs(
    name: str, shape: Sequence[int], dtype: str, runs: Iterable[tuple[TensorEntry, int, int]]
) -> Assembled:
    """A tensor whose row-major order is ``runs`` of stored rows, one after the other.

    A run is the stored tensor (1-D), its first element that counts, and the number of elements. What is left
    over at the end of the last run is padding. Raises CheckpointError where the runs are too short.
    """
    total = prod(shape)
    parts: list[tuple[tuple[Piece, ...], int]] = []
    have = 0
    for entry, first, count in runs:
        # The last run may go on into padding, or into the next parameter of a flat buffer.
        count = min(count, total - have)
        if count > 0:
            _check_dtype(name, dtype, entry)
            # Before a piece is made of it: a truncated file is named here, and not met in the middle of a
            # read.
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
    """A tensor that stored boxes tile, each with its origin; whether they do, ``check_whole`` says.

    Raises CheckpointError for a box of another type.
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


# Memory that nothing wrote is never taken for weights, however wrong a reader is about a damaged directory.
def check_whole(assembled: Mapping[str, Assembled]) -> None:
    """Raise CheckpointError, naming the tensor, unless the pieces of each tensor tile its shape."""
    for tensor in assembled.values():
        shape, name = tensor.shape, shown(tensor.name)
        for piece in tensor.pieces:
            sizes = zip(piece.origin, piece.extent, shape, strict=True)
            if any(at < 0 or at + count > size for at, count, size in sizes):
                raise CheckpointError(
                    f"tensor {name} of shape {list(shape)} has a part that lies outside that shape"
                )
        # As many elements as the shape has, and none twice: then every element is there.
        have = sum(piece.numel for piece in tensor.pieces)
        if have != prod(shape):
            raise CheckpointError(
                f"tensor {name} has {prod(shape)} elements, but the files hold {have}: a file is missing, "
                "is there twice, or belongs to another job"
            )
        if len(tensor.pieces) > 1 and not _apart(tensor.pieces):
            raise CheckpointError(
                f"two parts of tensor {name} fill the same elements, and other elements stay empty: the "
                "files belong to two jobs, or are damaged"
            )


def _apart(pieces: Sequence[Piece]) -> bool:
    """Return whether no two of the pieces have an element in common."""
    # In the order of their first dimension: a box is compared with those that begin before it ends.
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


#: The folders in which accelerate's ``save_state`` leaves a sharded model's weights, and FSDP2's optimizer.
_ACCELERATE, _OPTIMIZER = ("pytorch_model_fsdp_0", "pytorch_model"), "optimizer_0"
#: The files that name the newest checkpoint of a DeepSpeed directory.
_LATEST = ("latest", "latest_universal")
#: How many directories may name the next one.
_DEEPEST = 8


#: How a number of a type is packed.
_NUMBERS = {"F32": "<f", "F64": "<d", "I64": "<q", "I32": "<i"}
#: Makes the entry of a tensor (of the name given) that a pickle in a file speaks of.
Placing = Callable[[str, StoredTensor], TensorEntry]


class PartFiles:
    """Files by the numbers that entries call them by.

    ``reading`` is the file that was opened last, for messages.
    """

    def __init__(self) -> None:
        self.paths: list[str] = []
        self._states: list[FileState] = []
        self.reading = ""

    def storage(self) -> Storage:
        """What the files are read by. Raises ReadError."""
        return LocalFiles.known(self.paths, self._states)

    @contextlib.contextmanager
    def opened(self, path: Path) -> Iterator[tuple[HeaderBytes, int, int]]:
        """Bytes, size and number of a file; raises ReadError if somebody writes to it meanwhile."""
        self.reading = str(path)
        number = len(self.paths)
        # Compared at the end: a file that somebody writes to while it is read may be a mixture of two.
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
        """The value of a stored tensor of one element; raises CheckpointError for another type."""
        form = _NUMBERS.get(entry.dtype)
        self.reading = self.paths[entry.file]
        if form is None or entry.numel != 1:
            raise CheckpointError(f"{self.reading}: {shown(entry.name)} is not a number")
        length = struct.calcsize(form)
        with open_regular(self.reading, "training") as (handle, _):
            return float(struct.unpack(form, handle.read(length, entry.offset))[0])

    def settings(self, values: Mapping[Any, Any], place: Placing) -> dict[str, Any]:
        """Return the settings of an optimizer's group; tensors without dimensions become numbers."""
        found = {}
        for key, value in values.items():
            if type(value) is StoredTensor and value.shape == ():
                entry = place(str(key), value)
                value = self.number(entry) if entry.dtype in _NUMBERS else None
            found[str(key)] = value
        return found

    def torch_file(self, path: Path) -> tuple[object, Placing]:
        """Return what a file of ``torch.save`` holds, and the function that places its tensors."""
        with self.opened(path) as (handle, size, number):
            archive = TorchArchive(handle, size, str(path))
            value = archive.value()

        def place(name: str, tensor: StoredTensor) -> TensorEntry:
            self.reading = str(path)
            return archive.entry(name, tensor, number)

        return value, place


class TrainingFormat(Format):
    """A format of directories in which each rank of a job has its share of weights and optimizer."""

    @abstractmethod
    def holds(self, directory: Path) -> bool:
        """Whether the files of the ranks lie in ``directory`` itself."""

    @abstractmethod
    def read(self, directory: Path, files: PartFiles) -> TrainingContents:
        """What the files of all ranks hold together; ``files`` takes note of each that is read.

        Raises CheckpointError and CheckpointNotFoundError where they are not whole, ReadError if reading
        fails.
        """

    def recognises(self, path: Path) -> bool:
        """Whether such files lie in ``path`` or in a directory that it names, and no whole weights beside."""
        if not path.is_dir() or has_weights(path):
            return False
        # Names and small files are looked at here, and no pickle.
        with _damage_named(path, PartFiles()):
            located = _locate(path)
        return located is not None and located[1] is self

    def describe(self, path: Path, classes: Collection[str]) -> Catalog:
        """The weights alone; the states of an optimizer are for ``training_states``."""
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
    """All that such a directory holds, with the catalogs of weights and of an optimizer's states.

    In the second a state has the name ``optimizer/KEY/NAME``. None where the directory is none of these.
    Raises CheckpointError and CheckpointNotFoundError where it is not whole, ReadError if reading
    fails.
    """
    files = PartFiles()
    with _damage_named(directory, files):
        located = _locate(directory)
        if located is None:
            return None
        contents = _read(*located, files)
        # accelerate leaves FSDP2's optimizer in a folder beside that of the weights.
        beside = located[0].parent / _OPTIMIZER
        if located[0].name == _ACCELERATE[0] and (format_ := _held_by(beside)) is not None:
            optimizer = _read(beside, format_, files)
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
    """Where such a checkpoint lies in ``directory``, and when the last of its files was written, in seconds.

    None where there is none. Raises what looking for it does.
    """
    located = _locate(directory)
    if located is None:
        return None
    place = located[0]
    files = (entry for entry in place.iterdir() if entry.suffix != ".json" and entry.is_file())
    return place, max((entry.stat().st_mtime for entry in files), default=place.stat().st_mtime)


def _read(place: Path, format_: TrainingFormat, files: PartFiles) -> TrainingContents:
    contents = format_.read(place, files)
    # From here on what is wrong is of the directory, and of no one file.
    files.reading = str(place)
    check_whole(contents.assembled)
    return contents


@contextlib.contextmanager
def _damage_named(directory: Path, files: PartFiles) -> Iterator[None]:
    """Convert errors of damaged files to a CheckpointError that names the file; the cause names the line."""
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
    """The format whose files lie in ``directory`` itself."""
    if not directory.is_dir():
        return None
    training = (format_ for format_ in formats() if isinstance(format_, TrainingFormat))
    return next((one for one in training if one.holds(directory)), None)


def _locate(directory: Path, depth: int = 0) -> tuple[Path, TrainingFormat] | None:
    # Files that name folders may name each other.
    if depth > _DEEPEST:
        raise CheckpointError(
            f"{directory}: the checkpoint's directories refer to each other in a circle: {DAMAGED}"
        )
    if (format_ := _held_by(directory)) is not None:
        return directory, format_
    for name in _LATEST:
        if (directory / name).is_file():
            tag = read_small(str(directory / name)).decode("utf-8", "replace").strip()
            # A name out of a file, which nobody vouches for: it must not lead out of the directory.
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
    """Find the directory with the configuration: that of the weights, or one above it."""
    places = [directory, located, *located.parents[:2]]
    return str(next((place for place in places if (place / CONFIG_NAME).is_file()), directory))
