"""A mapping of tensors held in memory, as a catalog: its files are the tensors' storages.

An entry points into the storage that its tensor is a view of, with the tensor's strides.
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
    """Catalog of the tensors of a mapping, in its order.

    Raises ConfigError, naming the key, for a value whose bytes cannot be addressed.
    """
    given = dict(tensors.items())
    for name, tensor in given.items():
        _check(name, tensor)
    # Each storage is a file of its own, as large as the storage; tensors are ranges in it.
    storage, numbers = MemoryStorage.of(given)
    # One tensor under two names: the first has it, the second says whose it is.
    first: dict[int, str] = {}
    entries = {
        name: _entry(name, tensor, numbers[name], first.setdefault(id(tensor), name))
        for name, tensor in given.items()
    }
    return Catalog("", storage, entries, versions=_versions(tensors))


def _versions(state_dict: object) -> dict[str, dict[str, object]] | None:
    noted = getattr(state_dict, "_metadata", None)
    return plain_versions(noted) if isinstance(noted, Mapping) else None


def signature(catalog: Catalog) -> str:
    """A digest of names, types and shapes, in their order: what ranks that load together must agree on."""
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
    """Copy a row of bytes to memory of the host; from a device this waits for the copy."""
    if source.device.type == "cpu":
        # As memmove does it, which need not read first what it writes: a fifth faster than torch's loop.
        np.copyto(to.numpy(), source.numpy())
    else:
        to.copy_(source)


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
            move_bytes(torch.frombuffer(buffer, dtype=torch.uint8), part)
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
class _Known:
    """A tensor of a mapping, not kept alive; ``file`` is the number of its storage, ``mark`` as ``_mark``."""

    reference: weakref.ref[torch.Tensor]
    file: int
    mark: tuple[Hashable, ...]


@dataclass(frozen=True)
class MemoryStorage(Storage):
    """The storages of the tensors of a mapping, under names that serve messages."""

    #: Number of the tensors.
    count: int = 0
    #: Their bytes; their storages may be larger.
    stored: int = 0
    #: This rank's own storages, 1-D and of bytes; () after ``kept``.
    buffers: tuple[torch.Tensor, ...] = field(default=(), compare=False, repr=False)
    #: What views the buffers were of, by name.
    tensors: Mapping[str, _Known] = field(default_factory=dict, compare=False, repr=False)
    #: After ``kept``: the buffers that are needed again for certain.
    used: frozenset[int] = field(default=frozenset(), compare=False, repr=False)

    #: Every rank has all bytes in memory.
    worth_exchanging: ClassVar[bool] = False

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> tuple[MemoryStorage, dict[str, int]]:
        """The storages of plain tensors, and the number of each tensor's."""
        numbers: dict[tuple[torch.device, int, int], int] = {}
        found: dict[str, int] = {}
        files: list[str] = []
        buffers: list[torch.Tensor] = []
        for name, tensor in tensors.items():
            storage = tensor.untyped_storage()
            # Storages are told by where they lie: each call of ``untyped_storage`` makes another object for
            # the same.
            key = (tensor.device, storage.data_ptr(), storage.nbytes())
            if key not in numbers:
                numbers[key] = len(files)
                files.append(f"the tensor {shown(name)} in memory")
                buffers.append(_bytes_of(tensor))
            found[name] = numbers[key]
        _wait_for(buffers)
        made = cls(
            files=tuple(files),
            sizes=tuple(buffer.numel() for buffer in buffers),
            count=len(tensors),
            stored=sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()),
            buffers=tuple(buffers),
            tensors={
                name: _Known(weakref.ref(tensor), found[name], _mark(tensor))
                for name, tensor in tensors.items()
            },
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

    def reader(self, *, cold: bool = False, direct: bool = False) -> MemoryReader:
        """A reader of this rank's own buffers."""
        return MemoryReader(self.buffers)

    def residency(self) -> Residency:
        """All of it is here."""
        return Residency()

    def kept(self, used: Iterable[int] = ()) -> Storage:
        """Without the buffers: the tensors are the caller's, and not kept alive."""
        return replace(self, buffers=(), used=frozenset(used))

    def recalled(self, purpose: str) -> Storage:
        """With the buffers of the same tensors again.

        Raises EngineError where one that is used is gone, ReadError where one has changed, in place or by
        getting other memory.
        """
        buffers = [torch.empty(0, dtype=torch.uint8, device="cpu")] * len(self.files)
        is_changed = dict[int, bool]()
        for known in self.tensors.values():
            # One tensor that lives keeps its storage, and with it all other views.
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
    """All bytes of a tensor's storage, as a view."""
    storage = tensor.untyped_storage()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def _wait_for(buffers: Iterable[torch.Tensor]) -> None:
    for device in {buffer.device for buffer in buffers if buffer.device.type != "cpu"}:
        torch.accelerator.synchronize(device)


def _mark(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """What tells that a tensor has other values: a change in place counts up, ``.data`` and ``set_`` move it.

    Torch keeps no count for inference tensors.
    """
    storage = tensor.untyped_storage()
    version = 0 if tensor.is_inference() else tensor._version
    place = (tensor.device, storage.data_ptr(), storage.nbytes(), tensor.storage_offset())
    return (version, *place, tensor.dtype, tuple(tensor.shape), tensor.stride())
