"""Tensors in memory, on the host or on a device: the files are their storages.

Nothing is copied. The tensors must not change until the load is done.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from zerostart.checkpoint.storage.base import Reader, Residency, Rows, Storage
from zerostart.checkpoint.strict_json import shown
from zerostart.errors import EngineError, ReadError

__all__ = ["MemoryReader", "MemoryStorage"]


class MemoryReader(Reader):
    """Copies ranges of tensors in memory, on the host or on a device; safe to share between threads."""

    def __init__(self, sources: Sequence[torch.Tensor]) -> None:
        self._sources = sources

    def read(self, file: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill ``buffers`` from the bytes of source number ``file``; raises ReadError beyond its end."""
        source = self._sources[file]
        for buffer in buffers:
            part = source[offset : offset + len(buffer)]
            if len(part) != len(buffer):
                raise ReadError(f"the storage of tensor number {file} in memory shrank during the load")
            torch.frombuffer(buffer, dtype=torch.uint8).copy_(part)
            offset += len(buffer)

    def gather(self, file: int, offset: int, rows: Rows, target: memoryview, step: int) -> None:
        """Copy rows of source number ``file``; raises ReadError beyond its end."""
        source = self._sources[file]
        if offset + rows.span > len(source):
            raise ReadError(f"the storage of tensor number {file} in memory shrank during the load")
        shape = (rows.count, rows.width)
        view = torch.frombuffer(target, dtype=torch.uint8)
        view.as_strided(shape, (step, 1)).copy_(
            source.as_strided(shape, (rows.stride, 1), source.storage_offset() + offset)
        )


@dataclass(frozen=True)
class MemoryStorage(Storage):
    """The storages of the tensors of a mapping, under names that serve messages.

    ``holders`` are the ranks that have them; ``buffers`` are this rank's own, 1-D and of bytes, () on a rank
    that holds none, and ``tensors`` what they are views of, with the count of its changes in place.
    ``count`` and ``stored`` are the number of tensors and their bytes. Buffers and tensors do not travel.
    """

    holders: tuple[int, ...] = field(default=(0,), compare=False)
    count: int = 0
    stored: int = 0
    buffers: tuple[torch.Tensor, ...] = field(default=(), compare=False, repr=False)
    tensors: Mapping[str, tuple[weakref.ref[torch.Tensor], int]] = field(
        default_factory=dict, compare=False, repr=False
    )

    #: Every holder has all bytes at hand.
    worth_exchanging: ClassVar[bool] = False

    def __reduce__(self) -> tuple[Any, ...]:
        return MemoryStorage, (self.files, self.sizes, (), self.holders, self.count, self.stored)

    @classmethod
    def of(
        cls, tensors: Mapping[str, torch.Tensor], holders: tuple[int, ...]
    ) -> tuple[MemoryStorage, dict[str, int]]:
        """The storages of plain tensors, and the number of each tensor's."""
        numbers: dict[tuple[torch.device, int, int], int] = {}
        found: dict[str, int] = {}
        files: list[str] = []
        buffers: list[torch.Tensor] = []
        for name, tensor in tensors.items():
            storage = tensor.untyped_storage()
            key = (tensor.device, storage.data_ptr(), storage.nbytes())
            if key not in numbers:
                numbers[key] = len(files)
                files.append(f"the tensor {shown(name)} in memory")
                buffers.append(_bytes_of(tensor))
            found[name] = numbers[key]
        for device in {buffer.device for buffer in buffers if buffer.device.type != "cpu"}:
            # What computes the values may still run, in a stream that the reading threads know nothing of.
            torch.accelerator.synchronize(device)
        made = cls(
            files=tuple(files),
            sizes=tuple(buffer.numel() for buffer in buffers),
            holders=holders,
            count=len(tensors),
            stored=sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()),
            buffers=tuple(buffers),
            tensors={name: (weakref.ref(tensor), _version(tensor)) for name, tensor in tensors.items()},
        )
        return made, found

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors; their storages may be larger."""
        return self.stored

    @property
    def name(self) -> str:
        """A mapping has no name of its own."""
        return f"the mapping of {self.count} tensors"

    def readers(self, world_size: int) -> Sequence[int]:
        """The ranks that hold the mapping."""
        return self.holders

    def reader(self, *, cold: bool = False, direct: bool = False) -> MemoryReader:
        """A reader of this rank's own buffers."""
        return MemoryReader(self.buffers)

    def residency(self) -> Residency:
        """All of it is here."""
        return Residency()

    def kept(self, used: Iterable[int] = ()) -> Storage:
        """Without the buffers: the tensors are the caller's, and not kept alive."""
        return replace(self, buffers=())

    def recalled(self, purpose: str) -> Storage:
        """With the buffers of the same tensors again.

        Raises EngineError where one is gone, ReadError where one was changed in place.
        """
        alive: dict[str, torch.Tensor] = {}
        for name, (reference, version) in self.tensors.items():
            tensor = reference()
            if tensor is None:
                raise EngineError(f"the mapping that the model was loaded from is gone ({name}), {purpose}")
            if _version(tensor) != version:
                raise ReadError(
                    f"the tensor {name} was changed in place since the model was loaded from it, {purpose}"
                )
            alive[name] = tensor
        return MemoryStorage.of(alive, self.holders)[0] if alive else self


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage, as a view."""
    storage = tensor.untyped_storage()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def _version(tensor: torch.Tensor) -> int:
    """Counts changes in place; torch keeps no count for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version
