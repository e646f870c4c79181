"""Catalog of a mapping of tensors in memory: its files are the tensors' storages.

An entry points into the storage of its tensor, with the tensor's strides.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch

from zerostart.checkpoint.catalog import TORCH_NAMES, Catalog, TensorEntry, contiguous_strides
from zerostart.checkpoint.formats.inert_pickle import plain_versions
from zerostart.checkpoint.storage.base import Reader, Residency, Rows, Storage
from zerostart.checkpoint.strict_json import shown
from zerostart.errors import ConfigError, EngineError, ReadError


def memory_catalog(tensors: Mapping[str, torch.Tensor]) -> Catalog:
    """Return the catalog of a mapping of tensors.

    Raises ConfigError with the key of a value whose bytes cannot be addressed.
    """
    named = dict(tensors.items())
    for name, tensor in named.items():
        _check(name, tensor)
    # Each storage is a separate file; tensors are ranges in it.
    storage, numbers = MemoryStorage.of(named)
    # A tensor with two names: the second entry refers to the first.
    first: dict[int, str] = {}
    entries = {
        name: _entry(name, tensor, numbers[name], first.setdefault(id(tensor), name))
        for name, tensor in named.items()
    }
    return Catalog("", storage, entries, versions=_versions(tensors))


def _versions(state_dict: object) -> dict[str, dict[str, object]] | None:
    metadata = getattr(state_dict, "_metadata", None)
    return plain_versions(metadata) if isinstance(metadata, Mapping) else None


def signature(catalog: Catalog) -> str:
    """Hash names, types and shapes, for comparison between ranks."""
    digest = hashlib.sha256()
    for entry in catalog.tensors.values():
        digest.update(repr((entry.name, entry.dtype, entry.shape)).encode())
    digest.update(repr(catalog.versions).encode())
    return digest.hexdigest()


def _entry(name: str, tensor: torch.Tensor, file: int, first: str) -> TensorEntry:
    shape, strides = tuple(tensor.shape), tensor.stride()
    width = tensor.dtype.itemsize
    return TensorEntry(
        name,
        TORCH_NAMES[str(tensor.dtype).removeprefix("torch.")],
        shape,
        file,
        int(tensor.storage_offset()) * width,
        tensor.numel() * width,
        None if contiguous_strides(shape, strides) else strides,
        int(tensor.storage_offset()),
        "" if first == name else first,
    )


def _check(name: object, tensor: object) -> None:
    if not isinstance(name, str):
        raise ConfigError(f"source: the mapping has a key of type {type(name).__name__}; names are strings")
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(
            f"source[{name!r}] is a {type(tensor).__name__}, not a tensor; leave it out of the mapping"
        )
    reason = None
    if tensor.layout != torch.strided or tensor.is_quantized:
        reason = f"is {tensor.layout} {tensor.dtype}; make it a plain dense tensor"
    elif type(tensor).__torch_dispatch__ != torch.Tensor.__torch_dispatch__:
        reason = f"is a {type(tensor).__name__}, which keeps its data elsewhere; pass a plain tensor of it"
    elif tensor.device.type == "meta":
        reason = "is on the meta device and has no data"
    elif tensor.is_conj() or tensor.is_neg():
        reason = "is a lazy conjugate or negative; pass tensor.resolve_conj().resolve_neg()"
    elif str(tensor.dtype).removeprefix("torch.") not in TORCH_NAMES:
        reason = f"has the dtype {tensor.dtype}, which this version does not read"
    if reason is not None:
        raise ConfigError(f"source[{name!r}] {reason}")


def move_bytes(to: torch.Tensor, source: torch.Tensor) -> None:
    """Copy bytes to host memory, and wait for it."""
    if source.device.type == "cpu":
        # memmove need not read its target first: a fifth faster than torch's loop.
        np.copyto(to.numpy(), source.numpy())
    else:
        to.copy_(source)


class MemoryReader(Reader):
    """Thread-safe reader of tensors in memory."""

    def __init__(self, sources: Sequence[torch.Tensor]) -> None:
        self._sources = sources

    def read(self, file: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill ``buffers`` from a source. Raises ReadError."""
        source = self._sources[file]
        for buffer in buffers:
            part = source[offset : offset + len(buffer)]
            if len(part) != len(buffer):
                raise ReadError(f"the storage of tensor number {file} in memory shrank during the load")
            move_bytes(torch.frombuffer(buffer, dtype=torch.uint8), part)
            offset += len(buffer)

    def gather(self, file: int, offset: int, rows: Rows, target: memoryview, step: int) -> None:
        """Copy rows of a source. Raises ReadError."""
        source = self._sources[file]
        if offset + rows.span > len(source):
            raise ReadError(f"the storage of tensor number {file} in memory shrank during the load")
        shape = (rows.count, rows.width)
        view = torch.frombuffer(target, dtype=torch.uint8)
        view.as_strided(shape, (step, 1)).copy_(
            source.as_strided(shape, (rows.stride, 1), source.storage_offset() + offset)
        )


@dataclass(frozen=True)
class _Known:
    """Weak reference to a tensor, with storage number and mark."""

    reference: weakref.ref[torch.Tensor]
    file: int
    mark: tuple[Hashable, ...]


@dataclass(frozen=True)
class MemoryStorage(Storage):
    """Storages of the tensors of a mapping."""

    #: Number of tensors.
    count: int = 0
    #: Bytes of the tensors; their storages may be larger.
    stored: int = 0
    #: Storages of this rank, 1-D and of bytes; () after ``detach``.
    buffers: tuple[torch.Tensor, ...] = field(default=(), compare=False, repr=False)
    #: Tensors whose storages the buffers are, by name.
    tensors: Mapping[str, _Known] = field(default_factory=dict, compare=False, repr=False)
    #: Buffers that are certainly needed again, after ``detach``.
    used: frozenset[int] = field(default=frozenset(), compare=False, repr=False)

    #: Every rank has all bytes in memory.
    worth_exchanging: ClassVar[bool] = False

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> tuple[MemoryStorage, dict[str, int]]:
        """Return the storages, and the storage number per tensor."""
        numbers: dict[tuple[torch.device, int, int], int] = {}
        number_of_name: dict[str, int] = {}
        files: list[str] = []
        buffers: list[torch.Tensor] = []
        for name, tensor in tensors.items():
            storage = tensor.untyped_storage()
            # Storages are identified by address: each call of ``untyped_storage`` may return another object.
            key = (tensor.device, storage.data_ptr(), storage.nbytes())
            if key not in numbers:
                numbers[key] = len(files)
                files.append(f"the tensor {shown(name)} in memory")
                buffers.append(_bytes_of(tensor))
            number_of_name[name] = numbers[key]
        _wait_for(buffers)
        storage_of_all = cls(
            files=tuple(files),
            sizes=tuple(buffer.numel() for buffer in buffers),
            count=len(tensors),
            stored=sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()),
            buffers=tuple(buffers),
            tensors={
                name: _Known(weakref.ref(tensor), number_of_name[name], _mark(tensor))
                for name, tensor in tensors.items()
            },
        )
        return storage_of_all, number_of_name

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors; their storages may be larger."""
        return self.stored

    @property
    def name(self) -> str:
        """Description of the mapping, which has no name."""
        return f"the mapping of {self.count} tensors"

    def reader(self, *, cold: bool = False, direct: bool = False) -> MemoryReader:
        return MemoryReader(self.buffers)

    def residency(self) -> Residency:
        return Residency()

    def detach(self, used: Iterable[int] = ()) -> Storage:
        """Return the storage without the caller's buffers."""
        return replace(self, buffers=(), used=frozenset(used))

    def reattach(self, purpose: str) -> Storage:
        """Return the storage with the same buffers again.

        Raises EngineError if a used tensor is gone, ReadError if one has changed in place or has
        other memory.
        """
        buffers = [torch.empty(0, dtype=torch.uint8, device="cpu")] * len(self.files)
        is_changed = dict[int, bool]()
        for known in self.tensors.values():
            # A live tensor keeps its storage, and so all views of it, alive.
            if (tensor := known.reference()) is not None:
                buffers[known.file] = _bytes_of(tensor)
                is_changed[known.file] = is_changed.get(known.file, False) or _mark(tensor) != known.mark
        for name, known in self.tensors.items():
            if known.file not in is_changed and known.file in self.used:
                raise EngineError(f"the mapping that the model was loaded from is gone ({name}), {purpose}")
            if is_changed.get(known.file) and known.file in self.used:
                raise ReadError(
                    f"the tensor {name} was changed in place since the model was loaded from it, {purpose}"
                )
            if is_changed.get(known.file):
                buffers[known.file] = buffers[known.file][:0]  # a read of it fails
        _wait_for(buffers)
        return replace(self, buffers=tuple(buffers))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def _wait_for(buffers: Iterable[torch.Tensor]) -> None:
    for device in {buffer.device for buffer in buffers if buffer.device.type != "cpu"}:
        torch.accelerator.synchronize(device)


def _mark(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """Return a value that changes with the tensor's contents.

    A change in place counts up, ``.data`` and ``set_`` move it. Torch has no count for inference tensors.
    """
    storage = tensor.untyped_storage()
    version = 0 if tensor.is_inference() else tensor._version
    place = (tensor.device, storage.data_ptr(), storage.nbytes(), tensor.storage_offset())
    return (version, *place, tensor.dtype, tuple(tensor.shape), tensor.stride())
