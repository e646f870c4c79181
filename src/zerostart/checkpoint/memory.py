"""A mapping of tensors held in memory, as a catalog: its files are the tensors' storages.

An entry points into the storage that its tensor is a view of, with the tensor's strides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from zerostart.checkpoint.catalog import TORCH_NAMES, Catalog, TensorEntry, contiguous_strides
from zerostart.checkpoint.formats.inert_pickle import plain_versions
from zerostart.checkpoint.storage.memory import MemoryStorage
from zerostart.errors import ConfigError


def memory_catalog(tensors: Mapping[str, torch.Tensor], holders: tuple[int, ...] = (0,)) -> Catalog:
    """Catalog of the tensors of a mapping, in its order; ``holders`` are the ranks that have it.

    Raises ConfigError, naming the key, for a value whose bytes cannot be addressed.
    """
    given = dict(tensors.items())
    for name, tensor in given.items():
        _check(name, tensor)
    storage, numbers = MemoryStorage.of(given, holders)
    first: dict[int, str] = {}
    entries = {
        name: _entry(name, tensor, numbers[name], first.setdefault(id(tensor), name))
        for name, tensor in given.items()
    }
    return Catalog("", storage, entries, versions=_versions(tensors))


def _versions(state_dict: object) -> dict[str, dict[str, Any]] | None:
    """What torch notes of each module in a state dict's ``_metadata``, as far as it is plain data."""
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
    """Refuse what is no plain tensor with data."""
    if not isinstance(name, str):
        raise ConfigError(f"source: the mapping has a key of type {type(name).__name__}; names are strings")
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(
            f"source[{name!r}] is a {type(tensor).__name__}, and not a tensor; leave it out of the mapping"
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
