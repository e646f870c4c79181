"""Read files of ``torch.save`` (zip format, since torch 1.6) as catalogs, without running their code.

The archive holds one uncompressed record for each storage, and a pickle that says which tensors are views of
which storages. The pickle is read as data (``inert_pickle``). An entry points to the tensor's bytes in the
file. A transposed, sliced or expanded tensor is an entry with strides, and tied tensors are entries with the
same bytes.

The weights are the tensors of a state dict at the top, or one level below under one of the names that
training frameworks use (``WRAPPERS``). The catalog's metadata names everything else in the file.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from math import prod
from typing import Any, NoReturn

from zerostart.checkpoint.catalog import DTYPE_BITS, TORCH_NAMES, TensorEntry, contiguous_strides
from zerostart.checkpoint.formats.inert_pickle import StoredTensor, plain_versions, read_inert_pickle
from zerostart.checkpoint.storage.base import HeaderBytes, Opener
from zerostart.checkpoint.storage.files import open_regular
from zerostart.checkpoint.strict_json import DAMAGED, HEAD_BYTES, named_kind, shown
from zerostart.errors import CheckpointError, printable

#: Keys of the weights in files of Lightning and timm, fairseq, DeepSpeed, tutorials, Wan.
WRAPPERS = ("state_dict", "model", "module", "model_state_dict", "model_state")
#: Maximum size of the pickle and of the archive's directory, in bytes: a tensor takes 200 and 100.
MAX_READ_BYTES = 1 << 25
#: Key of the notes for module versions, as JSON.
NOTED_VERSIONS = "_metadata"
_MAX_COUNT = 2**63 - 1
_CONVERT = (
    "if you trust where it comes from, load it once with torch.load(..., weights_only=False) and save its "
    "tensors as safetensors, or with torch.save"
)


def read_torch_file(
    path: str | os.PathLike[str], file_index: int = 0, opened: Opener = open_regular
) -> tuple[list[TensorEntry], dict[str, str], int]:
    """Return entries, notes and size of a torch file.

    Entries are in state dict order. Raises CheckpointNotFoundError if there is no such file,
    CheckpointError if it is not a zip archive of torch, holds anything but plain tensors and containers,
    or contradicts itself, ReadError if reading fails.
    """
    name = os.fspath(path)
    with opened(name, "torch") as (handle, size):
        archive = TorchArchive(handle, size, name)
        weights, metadata = _weights(archive.value(weights=True), name)
        first: dict[int, str] = {}
        entries = [
            archive.entry(key, tensor, file_index, first.setdefault(id(tensor), key))
            for key, tensor in weights.items()
        ]
    return entries, {"format": "pt", **metadata}, size


class _Bytes(io.RawIOBase):
    """Part of an open file, for ``zipfile``.

    One read returns at most ``MAX_READ_BYTES``.
    """

    def __init__(self, handle: HeaderBytes, base: int, size: int, path: str) -> None:
        self._handle, self._base, self._size, self._path, self._at = handle, base, size, path, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._size)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, length: int = -1) -> bytes:
        available = max(0, self._size - self._at)
        length = available if length < 0 else min(length, available)
        if length > MAX_READ_BYTES:
            raise CheckpointError(
                f"{self._path}: a part of {length} bytes is beyond the limit of {MAX_READ_BYTES}: {DAMAGED}"
            )
        data = self._handle.read(length, self._base + self._at)
        self._at += length
        return data


class TorchArchive:
    """Open archive: its pickle and the offsets of storages.

    It may be a part of a file: ``size`` bytes from byte ``base``. Raises CheckpointError if torch did not
    write it.
    """

    def __init__(self, handle: HeaderBytes, size: int, path: str, base: int = 0) -> None:
        self._path, self._base, self._size = path, base, size
        self._file = _Bytes(handle, base, size, path)
        if (head := self._file.read(HEAD_BYTES))[:4] != b"PK\3\4":
            kind = named_kind(head) or DAMAGED
            raise CheckpointError(
                f"{path}: not a file of torch.save since version 1.6 (a zip archive): {kind}"
            )
        self._records = self._directory()
        pickles = [name for name in self._records if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise CheckpointError(
                f"{path}: the archive has no data.pkl, so torch.save did not write it: {DAMAGED}"
            )
        self._prefix = pickles[0].removesuffix("data.pkl")
        order = f"{self._prefix}byteorder"
        if order in self._records and self._read(order) != b"little":
            raise CheckpointError(
                f"{path}: written on a big-endian machine; load it with torch.load and save it again here"
            )
        begin = f"{self._prefix}data/"
        # All at once, so that ``entry`` works after the file is closed.
        self._storages = {name: self._locate(name) for name in self._records if name.startswith(begin)}

    def value(self, weights: bool = False) -> Any:
        """Return the content of the pickle.

        ``weights`` allows only tensors and plain containers. Raises CheckpointError if the pickle is
        refused, damaged, or too large.
        """
        return read_inert_pickle(self._read(f"{self._prefix}data.pkl"), self._path, weights)

    def entry(self, name: str, tensor: StoredTensor, file_index: int, first: str = "") -> TensorEntry:
        """Return the entry of one tensor.

        ``first`` is the first name of the tensor in the file. Raises CheckpointError unless it is
        inside its storage.
        """
        if (dtype := TORCH_NAMES.get(tensor.dtype)) is None:
            self._refuse(name, f"has elements of type {tensor.dtype}, which this version does not read")
        if tensor.bits:
            self._refuse(
                name, "is stored as a conjugate or negative view; save tensor.resolve_conj().resolve_neg()"
            )
        width, count = DTYPE_BITS[dtype] // 8, prod(tensor.shape)
        record = f"{self._prefix}data/{tensor.storage.key}"
        if record not in self._storages:
            self._refuse(name, f"lies in record {shown(record)}, which the archive does not have")
        start, length = self._storages[record]
        steps = zip(tensor.shape, tensor.strides, strict=True)
        if count and (tensor.offset + sum((n - 1) * step for n, step in steps) + 1) * width > length:
            self._refuse(name, f"reaches beyond its storage of {length} bytes")
        if count * width > _MAX_COUNT:
            self._refuse(name, f"has the shape {shown(str(tensor.shape))}, whose size overflows 64 bits")
        plain = count == 0 or contiguous_strides(tensor.shape, tensor.strides)
        before = tensor.offset if count else 0
        return TensorEntry(
            *(name, dtype, tensor.shape, file_index, self._base + start + before * width, count * width),
            strides=None if plain else tensor.strides,
            storage_offset=before,
            same_as="" if first == name else first,
        )

    def _directory(self) -> dict[str, zipfile.ZipInfo]:
        try:
            with zipfile.ZipFile(self._file) as archive:
                infos = archive.infolist()
        except (zipfile.BadZipFile, NotImplementedError, ArithmeticError, ValueError) as error:
            raise CheckpointError(
                f"{self._path}: the archive is truncated or damaged ({error}): download it again"
            ) from error
        records = {info.orig_filename: info for info in infos}
        if len(records) != len(infos):
            raise CheckpointError(f"{self._path}: a record of the archive is there twice: {DAMAGED}")
        return records

    def _locate(self, name: str) -> tuple[int, int]:
        info = self._records[name]
        self._file.seek(info.header_offset)
        head = self._file.read(30)
        offset = info.header_offset + 30 + sum(int.from_bytes(head[at : at + 2], "little") for at in (26, 28))
        if info.flag_bits & 1 or info.compress_type or info.compress_size != info.file_size:
            reason = "is compressed or encrypted, as TorchScript does it; save the state dict by torch.save"
        elif head[:4] != b"PK\3\4" or info.header_offset < 0 or offset + info.file_size > self._size:
            reason = f"reaches beyond the file: {DAMAGED}"
        else:
            return offset, info.file_size
        raise CheckpointError(f"{self._path}: record {shown(name)} {reason}")

    def _read(self, name: str) -> bytes:
        offset, length = self._locate(name)
        self._file.seek(offset)
        return self._file.read(length)

    def _refuse(self, name: str, reason: str) -> NoReturn:
        raise CheckpointError(f"{self._path}: tensor {shown(name)} {reason}: {DAMAGED}")


def _weights(value: Any, path: str) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    if not isinstance(value, dict):
        kind = "tensor" if type(value) is StoredTensor else type(value).__name__
        raise CheckpointError(f"{path}: holds a {kind}, not a state dict; {_CONVERT}")
    notes: dict[str, str] = {}
    outer: dict[Any, Any] = {}
    wrapped = [key for key in WRAPPERS if isinstance(value.get(key), dict) and _tensors(value[key])]
    if len(wrapped) > 1:
        raise CheckpointError(
            f"{path}: holds several sets of weights ({' and '.join(wrapped)}), and it is not clear "
            "which one to load; save the one that is meant as a file of its own"
        )
    if wrapped:
        outer, value = value, value[wrapped[0]]
        notes["state_dict"] = wrapped[0]
    tensors = _tensors(value)
    names = [key for key in outer if key not in wrapped] + [key for key in value if key not in tensors]
    ignored = ", ".join(printable(str(name)) for name in names[:20]) + (", ..." if names[20:] else "")
    if names and not tensors:
        raise CheckpointError(
            f"{path}: holds no tensors at its top level or under {', '.join(WRAPPERS)}; it holds "
            f"{ignored}. Save the state dict as a file of its own"
        )
    if names:
        notes["ignored"] = ignored
    if (metadata := getattr(value, "metadata", None)) is not None:
        notes[NOTED_VERSIONS] = json.dumps(plain_versions(metadata))
    if (name := next((key for key in tensors if type(key) is not str), "")) != "":
        raise CheckpointError(f"{path}: a tensor has a {type(name).__name__} for a name, not a string")
    return tensors, notes


def _tensors(value: dict[object, object]) -> dict[Any, StoredTensor]:
    return {key: item for key, item in value.items() if type(item) is StoredTensor}
