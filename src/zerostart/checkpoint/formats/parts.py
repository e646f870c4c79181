"""The many files of a training checkpoint, numbered as they are read, each one and the same throughout."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from zerostart.checkpoint.catalog import TensorEntry
from zerostart.checkpoint.formats.inert_pickle import Made, StoredTensor
from zerostart.checkpoint.formats.torch_zip import TorchArchive
from zerostart.checkpoint.storage.base import HeaderBytes
from zerostart.checkpoint.storage.files import FileState, open_regular
from zerostart.checkpoint.strict_json import shown
from zerostart.errors import CheckpointError, ReadError

#: How a number of a type is packed.
_NUMBERS = {"F32": "<f", "F64": "<d", "I64": "<q", "I32": "<i"}
#: Makes the entry of a tensor (of the name given) that a pickle in a file speaks of.
Placing = Callable[[str, StoredTensor], TensorEntry]


class PartFiles:
    """Local files, by the numbers that entries call them by.

    ``reading`` is the file that was opened last and ``record`` what of it is looked at: for messages.
    """

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.states: list[FileState] = []
        self.reading = self.record = ""

    @contextlib.contextmanager
    def opened(self, path: Path) -> Iterator[tuple[HeaderBytes, int, int]]:
        """Bytes, size and number of a file; raises ReadError if somebody writes to it meanwhile."""
        before = FileState.at(str(path))
        self.reading, self.record = str(path), ""
        with open_regular(str(path), "training") as (handle, size):
            number = len(self.paths)
            yield handle, size, number
        if before is None or FileState.at(str(path)) != before:
            raise ReadError(f"{path} was changed while it was read; load again when nobody writes to it")
        self.paths.append(str(path))
        self.states.append(before)

    def number(self, entry: TensorEntry) -> float:
        """The value of a stored tensor of one element; raises CheckpointError for another type."""
        form = _NUMBERS.get(entry.dtype)
        self.reading, self.record = self.paths[entry.file], entry.name
        if form is None or entry.numel != 1:
            raise CheckpointError(f"{self.reading}: {shown(entry.name)} is not a number")
        with open_regular(self.reading, "training") as (handle, _):
            return float(struct.unpack(form, handle.read(struct.calcsize(form), entry.offset))[0])

    def torch_file(self, path: Path) -> tuple[Any, Placing]:
        """What a file of ``torch.save`` holds, and what places its tensors."""
        with self.opened(path) as (handle, size, number):
            archive = TorchArchive(handle, size, str(path))
            value = archive.value()
            entries = {id(tensor): _entry(archive, tensor, number) for tensor in _tensors(value)}

        def place(name: str, tensor: StoredTensor) -> TensorEntry:
            self.reading, self.record = str(path), name
            found = entries[id(tensor)]
            if isinstance(found, CheckpointError):
                raise found
            return TensorEntry(
                name, found.dtype, found.shape, number, found.offset, found.nbytes, found.strides
            )

        return value, place


class Window:
    """``length`` bytes of an open file from ``base`` on, as a file of their own."""

    def __init__(self, handle: HeaderBytes, base: int, length: int) -> None:
        self._handle, self._base, self._length = handle, base, length

    def read(self, length: int, offset: int) -> bytes:
        """As of a file that has no more than the window."""
        return self._handle.read(max(0, min(length, self._length - offset)), self._base + offset)


def _entry(archive: TorchArchive, tensor: StoredTensor, number: int) -> TensorEntry | CheckpointError:
    """Where a tensor lies, or why it cannot be read, which matters only if somebody wants it."""
    try:
        return archive.entry("", tensor, number)
    except CheckpointError as error:
        return error


def local_tensor(made: Made) -> StoredTensor | None:
    """The part of a DTensor that its rank has; None for an object that is none."""
    local = made.get("_local_tensor")
    return local if type(local) is StoredTensor else None


def _tensors(value: Any) -> Iterator[StoredTensor]:
    """Every tensor in what a pickle holds, in containers of any depth."""
    seen: set[int] = set()
    open_ones = [value]
    while open_ones:
        item = open_ones.pop()
        if type(item) is StoredTensor:
            yield item
        elif isinstance(item, Made) and (local := local_tensor(item)) is not None:
            yield local
        elif isinstance(item, (dict, list, tuple)) and id(item) not in seen:
            seen.add(id(item))
            open_ones += item.values() if isinstance(item, dict) else item
