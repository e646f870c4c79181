"""Files that ``torch.save`` writes (zip format, since torch 1.6), as catalogs: no code of theirs is run.

The archive holds one record for each storage, uncompressed, and a pickle that says which tensors are views of
which storages. The pickle is read as data (``weights_pickle``); the tensors' bytes stay where they are, and
an entry points into the file. A transposed, sliced or expanded tensor is an entry with strides, and tied
tensors are entries with the same bytes.

The weights are the tensors of a state dict at the top, or one level below under one of the names that
training frameworks use (``WRAPPERS``). What else the file holds (counters, optimizer state) is left alone
and named in the catalog's metadata.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, NoReturn

from zerostart.checkpoint.catalog import DTYPE_BITS, TORCH_NAMES, TensorEntry, contiguous_strides
from zerostart.checkpoint.formats.weights_pickle import VERSIONS, StoredTensor, read_weights_pickle
from zerostart.checkpoint.formats.zip_index import ZipIndex, read_zip_index
from zerostart.checkpoint.recognising import named_kind
from zerostart.checkpoint.storage.base import HeaderBytes, Opener
from zerostart.checkpoint.storage.files import open_regular
from zerostart.checkpoint.strict_json import DAMAGED, shown
from zerostart.errors import CheckpointError

__all__ = ["NOTED_VERSIONS", "WRAPPERS", "TorchArchive", "read_torch_file"]

#: Keys that frameworks put the weights under: Lightning and timm, fairseq, DeepSpeed, tutorials, Wan.
WRAPPERS = ("state_dict", "model", "module", "model_state_dict", "model_state")
#: A tensor takes about 200 bytes of the pickle.
MAX_PICKLE_BYTES = 1 << 26
_MAX_COUNT = 2**63 - 1
_CONVERT = (
    "if you trust where it comes from, load it once with torch.load(..., weights_only=False) and save its "
    "tensors as safetensors, or with torch.save"
)


#: The key of a file's notes under which is, as JSON, what torch noted of its modules.
NOTED_VERSIONS = "_metadata"


def read_torch_file(
    path: str | os.PathLike[str], file_index: int = 0, opened: Opener = open_regular
) -> tuple[list[TensorEntry], dict[str, str], int]:
    """Entries of one torch file in the order of its state dict, notes about the rest, and its size in bytes.

    ``opened`` opens it, a local file if nothing else is said.

    Raises CheckpointNotFoundError if there is no such file, CheckpointError if it is no zip archive of
    torch's, holds anything but plain tensors and containers, or contradicts itself, ReadError if reading
    fails.
    """
    name = os.fspath(path)
    with opened(name, "torch") as (handle, size):
        archive = TorchArchive(handle, size, name)
        weights, metadata = _weights(archive.value(read_weights_pickle), name)
        first: dict[int, str] = {}
        entries = [
            archive.entry(key, tensor, file_index, first.setdefault(id(tensor), key))
            for key, tensor in weights.items()
        ]
    return entries, {"format": "pt", **metadata}, size


class TorchArchive:
    """One open archive of ``size`` bytes: what its pickle says, and where its storages lie.

    ``handle`` may show a part of a larger file, which begins at byte ``base`` of that. Raises
    CheckpointError if it is none of torch's.
    """

    def __init__(self, handle: HeaderBytes, size: int, path: str, base: int = 0) -> None:
        _check_format(handle.read(512, 0), path)
        self._index = read_zip_index(handle, size, path)
        self._prefix = _archive(self._index)
        self._base = base
        self._found: dict[str, tuple[int, int]] = {}

    def value(self, read: Callable[[bytes, str], Any]) -> Any:
        """What the pickle holds, as ``read`` (of raw bytes and the path) gives it."""
        return read(self._index.read(f"{self._prefix}data.pkl", MAX_PICKLE_BYTES), self._index.path)

    def entry(self, name: str, tensor: StoredTensor, file_index: int, first: str = "") -> TensorEntry:
        """The entry of one tensor, which is also called ``first``, if that is given.

        Raises CheckpointError unless it lies inside its storage.
        """
        dtype = TORCH_NAMES.get(tensor.dtype)
        unit = TORCH_NAMES.get(tensor.storage.dtype)
        if dtype is None or unit is None:
            self._refuse(name, f"has elements of type {tensor.dtype}, which this version does not read")
        if tensor.bits:
            self._refuse(
                name, "is stored as a conjugate or negative view; save tensor.resolve_conj().resolve_neg()"
            )
        width = DTYPE_BITS[dtype] // 8
        start, length = self._storage(name, tensor.storage.key)
        if length != tensor.storage.numel * (DTYPE_BITS[unit] // 8):
            self._refuse(
                name, f"has a storage of {length} bytes where the pickle says {tensor.storage.numel} {unit}"
            )
        count = 1
        last = tensor.offset
        for size, stride in zip(tensor.shape, tensor.strides, strict=True):
            count *= size
            last += max(0, size - 1) * stride
            if count * width > _MAX_COUNT:
                self._refuse(name, f"has the shape {shown(str(tensor.shape))}, whose size overflows 64 bits")
        if count and (last + 1) * width > length:
            self._refuse(name, f"reaches beyond its storage of {length} bytes")
        plain = count == 0 or contiguous_strides(tensor.shape, tensor.strides)
        offset = self._base + start + (tensor.offset * width if count else 0)
        strides = None if plain else tensor.strides
        nbytes, before = count * width, tensor.offset if count else 0
        same_as = "" if first == name else first
        return TensorEntry(name, dtype, tensor.shape, file_index, offset, nbytes, strides, before, same_as)

    def _storage(self, name: str, key: str) -> tuple[int, int]:
        if key not in self._found:
            record = f"{self._prefix}data/{key}"
            if record not in self._index.records:
                self._refuse(name, f"lies in record {shown(record)}, which the archive does not have")
            self._found[key] = self._index.locate(record)
        return self._found[key]

    def _refuse(self, name: str, reason: str) -> NoReturn:
        raise CheckpointError(f"{self._index.path}: tensor {shown(name)} {reason}: {DAMAGED}")


def _check_format(head: bytes, path: str) -> None:
    """Refuse what is no zip file, by the name of what it is."""
    if head[:4] == b"PK\3\4":
        return
    if head[:1] == b"\x80" or head[257:262] == b"ustar":
        kind = "a bare pickle" if head[:1] == b"\x80" else "a tar archive"
        raise CheckpointError(
            f"{path}: in the format of torch.save before version 1.6 ({kind}), whose tensors cannot be read "
            f"without running what it holds; {_CONVERT}"
        )
    what = named_kind(head) or DAMAGED
    raise CheckpointError(f"{path}: not a file of torch.save (no zip archive): {what}")


def _archive(index: ZipIndex) -> str:
    """The folder in the archive that everything lies in, with its slash."""
    pickles = [name for name in index.records if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise CheckpointError(
            f"{index.path}: the archive has no data.pkl, so torch.save did not write it: {DAMAGED}"
        )
    prefix = pickles[0].removesuffix("data.pkl")
    if f"{prefix}constants.pkl" in index.records:
        raise CheckpointError(
            f"{index.path}: a TorchScript program and no state dict; {_CONVERT}, from torch.jit.load(...)"
        )
    order = f"{prefix}byteorder"
    if order in index.records and index.read(order, 64) != b"little":
        raise CheckpointError(
            f"{index.path}: written on a big-endian machine; load it with torch.load and save it again here"
        )
    return prefix


def _weights(value: Any, path: str) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The state dict in what the pickle holds, and notes on where it was and what was left alone."""
    if type(value) is not dict:
        raise CheckpointError(f"{path}: holds a {_kind(value)} and not a state dict; {_CONVERT}")
    notes: dict[str, str] = {}
    versions = value.pop(VERSIONS, None)
    wrapped = [key for key in WRAPPERS if type(value.get(key)) is dict and _tensors(value[key])]
    if len(wrapped) > 1:
        raise CheckpointError(
            f"{path}: which weights are meant? It holds {' and '.join(wrapped)}; "
            "save the one as a file of its own"
        )
    left = {}
    if wrapped:
        left = {key: item for key, item in value.items() if key != wrapped[0]}
        value = value[wrapped[0]]
        notes["state_dict"] = wrapped[0]
        versions = value.pop(VERSIONS, None)
    found = _tensors(value)
    left |= {key: item for key, item in value.items() if type(item) is not StoredTensor}
    if left and not found:
        raise CheckpointError(
            f"{path}: no tensors at the top nor under {', '.join(WRAPPERS)}; it holds {_listed(left)}. "
            "Save the state dict as a file of its own"
        )
    if left:
        notes["ignored"] = _listed(left)
    if versions is not None:
        notes[NOTED_VERSIONS] = json.dumps(versions)
    for key in found:
        if type(key) is not str:
            raise CheckpointError(f"{path}: a tensor is called by a {type(key).__name__} and not by a name")
    return found, notes


def _tensors(value: dict[Any, Any]) -> dict[Any, StoredTensor]:
    return {key: item for key, item in value.items() if type(item) is StoredTensor}


def _kind(value: Any) -> str:
    return "tensor" if type(value) is StoredTensor else type(value).__name__


def _listed(values: dict[Any, Any]) -> str:
    names = [shown(key)[1:-1] if type(key) is str else f"a {type(key).__name__}" for key in values]
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
