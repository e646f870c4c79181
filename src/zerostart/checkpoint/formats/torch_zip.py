"""Files that ``torch.save`` writes (zip format, since torch 1.6), as catalogs: no code of theirs is run.

The archive holds one record for each storage, uncompressed, and a pickle that says which tensors are views of
which storages. The pickle is read as data (``inert_pickle``); the tensors' bytes stay where they are, and
an entry points into the file. A transposed, sliced or expanded tensor is an entry with strides, and tied
tensors are entries with the same bytes.

The weights are the tensors of a state dict at the top, or one level below under one of the names that
training frameworks use (``WRAPPERS``). What else the file holds (counters, optimizer state) is left alone
and named in the catalog's metadata.
"""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from typing import Any, NoReturn

from zerostart.checkpoint.catalog import DTYPE_BITS, TORCH_NAMES, TensorEntry, contiguous_strides
from zerostart.checkpoint.formats.inert_pickle import StoredTensor, plain_versions, read_inert_pickle
from zerostart.checkpoint.storage.base import HeaderBytes, Opener
from zerostart.checkpoint.storage.files import open_regular
from zerostart.checkpoint.strict_json import DAMAGED, named_kind, shown
from zerostart.errors import CheckpointError

#: Keys that frameworks put the weights under: Lightning and timm, fairseq, DeepSpeed, tutorials, Wan.
WRAPPERS = ("state_dict", "model", "module", "model_state_dict", "model_state")
#: A tensor takes about 200 bytes of the pickle.
MAX_PICKLE_BYTES = 1 << 26
#: A record takes about 100 bytes of the directory: enough for half a million tensors in one file.
MAX_DIRECTORY_BYTES, MAX_RECORDS = 1 << 26, 600_000
#: Of a record's own header the lengths at its end: of the name, and of what is between that and the data.
_LOCAL = struct.Struct("<26x2H")
#: Sizes follow the data, and the name is UTF-8: the flags that torch sets.
_ENCRYPTED, _KNOWN_FLAGS = 0x0001, 0x0808
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
        weights, metadata = _weights(archive.value(weights=True), name)
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
        self._handle, self._path, self._base = handle, path, base
        _check_format(handle.read(512, 0), path)
        self._records = _records(handle, size, path)
        self._prefix = self._folder()
        self._found: dict[str, tuple[int, int]] = {}

    def value(self, weights: bool = False) -> Any:
        """What the pickle holds; of a file of ``weights``, nothing but tensors and plain containers.

        Raises CheckpointError where it is refused, damaged, or too large.
        """
        raw = self._read(f"{self._prefix}data.pkl", MAX_PICKLE_BYTES)
        return read_inert_pickle(raw, self._path, weights)

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

    def storages(self, count: int) -> list[tuple[int, int]]:
        """Offset and bytes of each of the first ``count`` storages, as ``torch.save`` numbers them."""
        return [self._storage(f"number {number}", str(number)) for number in range(count)]

    def _storage(self, name: str, key: str) -> tuple[int, int]:
        if key not in self._found:
            record = f"{self._prefix}data/{key}"
            if record not in self._records:
                self._refuse(name, f"lies in record {shown(record)}, which the archive does not have")
            self._found[key] = self._locate(record)
        return self._found[key]

    def _locate(self, name: str) -> tuple[int, int]:
        """Offset in the file and length of a record's data, in bytes, if its own header says the same."""
        header, nbytes, end = self._records[name]
        named = name.encode()
        raw = self._handle.read(_LOCAL.size + len(named), header)
        if raw[:4] + raw[8:10] != b"PK\3\4\0\0" or raw[_LOCAL.size :] != named:
            _refuse(self._path, name, "has a header that contradicts the directory")
        length, extra = _LOCAL.unpack_from(raw)
        offset = header + _LOCAL.size + length + extra
        if offset + nbytes > end or length != len(named):
            _refuse(self._path, name, "reaches into what follows it")
        return offset, nbytes

    def _read(self, name: str, limit: int) -> bytes:
        """A record's data. Unlike ``zipfile`` without its checksum, which torch can be told not to write."""
        offset, length = self._locate(name)
        if length > limit:
            _refuse(self._path, name, f"has {length} bytes, beyond the limit of {limit}: {DAMAGED}")
        return self._handle.read(length, offset)

    def _folder(self) -> str:
        """The folder in the archive that everything lies in, with its slash."""
        pickles = [name for name in self._records if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise CheckpointError(
                f"{self._path}: the archive has no data.pkl, so torch.save did not write it: {DAMAGED}"
            )
        prefix = pickles[0].removesuffix("data.pkl")
        if f"{prefix}constants.pkl" in self._records:
            raise CheckpointError(
                f"{self._path}: a TorchScript program, not a state dict; {_CONVERT}, from torch.jit.load(...)"
            )
        order = f"{prefix}byteorder"
        if order in self._records and self._read(order, 64) != b"little":
            raise CheckpointError(
                f"{self._path}: written on a big-endian machine; load it with torch.load and save it again "
                "here"
            )
        return prefix

    def _refuse(self, name: str, reason: str) -> NoReturn:
        raise CheckpointError(f"{self._path}: tensor {shown(name)} {reason}: {DAMAGED}")


def _records(handle: HeaderBytes, size: int, path: str) -> dict[str, tuple[int, int, int]]:
    """Of each record of the archive the places of its header and of what follows it, and its bytes between.

    The directory is parsed by ``zipfile``. It is stricter here: one archive from the first byte to the last,
    nothing compressed, encrypted, twice there, or overlapping.
    """
    tail = handle.read(98, max(0, size - 98)).rjust(98, b"\0")  # the end record, and those of 64 bits
    if tail[76:80] != b"PK\5\6" or tail[96:] != b"\0\0":
        raise CheckpointError(f"{path}: the archive is truncated: no end record; download it again")
    (disks, here, count, length, start), stop = struct.unpack_from("<L2H2L", tail, 80), size - 22
    if tail[:4] == b"PK\6\6" and tail[56:60] == b"PK\6\7" and tail[64:72] == struct.pack("<Q", size - 98):
        (disks, here, count, length, start), stop = struct.unpack_from("<5Q", tail, 16), size - 98
    elif start == 0xFFFFFFFF or count == 0xFFFF:
        raise CheckpointError(f"{path}: the archive has no valid 64-bit end record: {DAMAGED}")
    if length > MAX_DIRECTORY_BYTES:
        raise CheckpointError(
            f"{path}: a directory of {length} bytes is beyond the limit of {MAX_DIRECTORY_BYTES}: {DAMAGED}"
        )
    if disks or here != count or start + length != stop:
        raise CheckpointError(f"{path}: the archive's end record contradicts itself: {DAMAGED}")
    raw = handle.read(length, start)
    if raw.count(b"PK\1\2") > MAX_RECORDS:
        raise CheckpointError(f"{path}: the archive has more than {MAX_RECORDS} records: {DAMAGED}")
    # An archive of nothing else, which begins with its directory: places of headers stay as they are.
    alone = raw + struct.pack("<4s8xL4xH", b"PK\5\6", len(raw), 0)
    try:
        with zipfile.ZipFile(io.BytesIO(alone)) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError) as error:
        raise CheckpointError(f"{path}: the archive's directory is damaged ({error}): {DAMAGED}") from error
    # Its last entry may not pose as an end record of 64 bits, which zipfile would go by.
    if not infos or len(infos) != count or raw[-20:-16] == b"PK\6\7":
        raise CheckpointError(f"{path}: the archive's directory contradicts its end record: {DAMAGED}")
    records: dict[str, tuple[int, int, int]] = {}
    infos.sort(key=lambda info: info.header_offset)
    for info, end in zip(infos, [*(info.header_offset for info in infos[1:]), start], strict=True):
        name, header = info.orig_filename, info.header_offset
        if not name or name.startswith("/") or ".." in name.split("/") or "\\" in name or "\0" in name:
            _refuse(path, name, "has a name that leads elsewhere; do not load this checkpoint")
        if name in records:
            _refuse(path, name, "is there twice")
        if header == end:
            _refuse(path, name, f"and another one lie in one place: {DAMAGED}")
        if info.flag_bits & _ENCRYPTED:
            _refuse(path, name, "is encrypted; save the weights again without")
        if info.compress_type or info.compress_size != info.file_size:
            _refuse(path, name, "is compressed, as TorchScript does it; save the state dict by torch.save")
        if info.flag_bits & ~_KNOWN_FLAGS or info.volume:
            _refuse(path, name, "has properties that torch.save never gives")
        if header + _LOCAL.size + len(name.encode()) + info.file_size > end:
            _refuse(path, name, "overlaps with another, or reaches beyond the data")
        records[name] = (header, info.file_size, end)
    return records


def _refuse(path: str, name: str, reason: str) -> NoReturn:
    raise CheckpointError(f"{path}: record {shown(name)} {reason}")


def _check_format(head: bytes, path: str) -> None:
    """Refuse what is no zip file, by the name of what it is."""
    if head[:4] == b"PK\3\4":
        return
    if head[:1] == b"\x80" or head[257:262] == b"ustar":
        kind = "a bare pickle" if head[:1] == b"\x80" else "a tar archive"
        raise CheckpointError(
            f"{path}: in the format of torch.save before version 1.6 ({kind}), whose tensors cannot be "
            f"read without running code in the file; {_CONVERT}"
        )
    what = named_kind(head) or DAMAGED
    raise CheckpointError(f"{path}: not a file written by torch.save (no zip archive): {what}")


def _weights(value: Any, path: str) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The state dict in what the pickle holds, and notes on where it was and what was left alone."""
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {_kind(value)}, not a state dict; {_CONVERT}")
    notes: dict[str, str] = {}
    wrapped = [key for key in WRAPPERS if isinstance(value.get(key), dict) and _tensors(value[key])]
    if len(wrapped) > 1:
        raise CheckpointError(
            f"{path}: holds several sets of weights ({' and '.join(wrapped)}), and it is not clear "
            "which one to load; save the one that is meant as a file of its own"
        )
    left = {}
    if wrapped:
        left = {key: item for key, item in value.items() if key != wrapped[0]}
        value = value[wrapped[0]]
        notes["state_dict"] = wrapped[0]
    found = _tensors(value)
    left |= {key: item for key, item in value.items() if type(item) is not StoredTensor}
    if left and not found:
        raise CheckpointError(
            f"{path}: holds no tensors at its top level or under {', '.join(WRAPPERS)}; it holds "
            f"{_listed(left)}. Save the state dict as a file of its own"
        )
    if left:
        notes["ignored"] = _listed(left)
    if (noted := getattr(value, "noted", None)) is not None:
        notes[NOTED_VERSIONS] = json.dumps(plain_versions(noted))
    for key in found:
        if type(key) is not str:
            raise CheckpointError(f"{path}: a tensor has a {type(key).__name__} for a name, not a string")
    return found, notes


def _tensors(value: dict[object, object]) -> dict[Any, StoredTensor]:
    return {key: item for key, item in value.items() if type(item) is StoredTensor}


def _kind(value: object) -> str:
    return "tensor" if type(value) is StoredTensor else type(value).__name__


def _listed(values: dict[object, object]) -> str:
    names = [shown(key)[1:-1] if type(key) is str else f"a {type(key).__name__}" for key in values]
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
