"""Parse safetensors headers strictly, without torch and the safetensors library.

A file is an unsigned 64-bit little-endian length N, N bytes of JSON, and the tensors' bytes (format:
https://github.com/huggingface/safetensors). The parser refuses what that library refuses, and ambiguous files
that it accepts: duplicate names, unknown fields, a tensor described by a list. Nothing is allocated because a
file asks for it: lengths are compared with the file size first.
"""

from __future__ import annotations

import os
from typing import NoReturn

from zerostart.checkpoint.catalog import DTYPE_BITS, TensorEntry
from zerostart.checkpoint.storage.base import Opener
from zerostart.checkpoint.storage.files import open_regular
from zerostart.checkpoint.strict_json import DAMAGED, HEAD_BYTES, MAX_JSON_BYTES, load_json, named_kind, shown
from zerostart.errors import CheckpointError, ReadError

_PREFIX_BYTES = 8
_METADATA = "__metadata__"
_FIELDS = frozenset(("dtype", "shape", "data_offsets"))
#: Maximum size and element count: torch counts in signed 64-bit integers.
_MAX_COUNT = 2**63 - 1


def read_header(
    path: str | os.PathLike[str], file_index: int = 0, opened: Opener = open_regular
) -> tuple[list[TensorEntry], dict[str, str], int]:
    """Return entries, metadata and size of a safetensors file.

    Entries are in byte order. ``opened`` opens the file, a local one by default. Raises
    CheckpointNotFoundError if there is no such file, CheckpointError if a header field is wrong,
    ReadError if reading fails.
    """
    name = os.fspath(path)
    with opened(name, "safetensors") as (handle, size):
        try:
            length = _header_length(handle.read(_PREFIX_BYTES, 0), size, name)
            raw = handle.read(length, _PREFIX_BYTES)
            if len(raw) != length:
                raise ReadError(
                    f"{name}: the file shrank while its header was read; is another process writing it?"
                )
            entries, metadata = parse_header(raw, size, name, file_index)
        except CheckpointError as error:
            # The kind of another file (pickle, archive, HTML page) explains more than a wrong number in a
            # header.
            if kind := named_kind(handle.read(HEAD_BYTES, 0)):
                raise CheckpointError(f"{name}: not a safetensors file: {kind}") from error
            raise
    return entries, metadata, size


def parse_header(
    raw: bytes, file_size: int, path: str, file_index: int = 0
) -> tuple[list[TensorEntry], dict[str, str]]:
    """Parse the JSON header ``raw`` into entries and metadata.

    Entries are in byte order. ``file_size`` is the size of the whole file in bytes, ``path`` serves
    messages only, ``file_index`` is the number of the file in the entries. Offsets count from the start
    of the file. Raises CheckpointError with file and tensor unless every field is right and the tensors
    cover the rest of the file exactly: no overlap, no hole, nothing after the last.
    """
    header = load_json(raw, path, "header", header=True)
    metadata = _metadata(header.pop(_METADATA, {}), path)
    data_start = _PREFIX_BYTES + len(raw)
    entries = [_entry(name, info, path, file_index, data_start) for name, info in header.items()]
    # Sort by offset, then size: an empty tensor precedes the one that begins at its offset.
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes, entry.name))
    _check_cover(entries, data_start, file_size, path)
    return entries, metadata


def _header_length(prefix: bytes, file_size: int, path: str) -> int:
    length = int.from_bytes(prefix, "little")
    if length > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{path}: a header of {length} bytes is beyond the limit of {MAX_JSON_BYTES}: {DAMAGED}"
        )
    if len(prefix) < _PREFIX_BYTES or _PREFIX_BYTES + length > file_size:
        raise CheckpointError(
            f"{path}: the file is truncated: its header takes {length} bytes, but the "
            f"file has {file_size}; download it again"
        )
    return length


def _metadata(value: object, path: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise CheckpointError(f"{path}: {_METADATA} must map strings to strings: the file is malformed")
    return value


def _counts(values: object) -> bool:
    if not isinstance(values, list):
        return False
    for value in values:  # noqa: SIM110 - twice as fast as a generator, in a header's hot loop
        if type(value) is not int or not 0 <= value <= _MAX_COUNT:
            return False
    return True


def _entry(name: str, info: object, path: str, file_index: int, data_start: int) -> TensorEntry:
    if not isinstance(info, dict) or info.keys() != _FIELDS:
        _refuse(path, name, f"is not described by exactly the fields {', '.join(sorted(_FIELDS))}")
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        kind = shown(dtype) if isinstance(dtype, str) else f"of JSON type {type(dtype).__name__}"
        _refuse(path, name, f"has the unknown dtype {kind} (known: {', '.join(DTYPE_BITS)})")
    if not _counts(shape):
        _refuse(path, name, "has a shape that is not a list of non-negative 64-bit integers")
    if not _counts(offsets) or len(offsets) != 2:
        _refuse(path, name, "has data_offsets that are not two non-negative 64-bit integers")
    begin, end = offsets
    if end < begin:
        _refuse(path, name, f"ends at {end}, before it begins at {begin}")
    total = bits
    for size in shape:
        total *= size
        # Check at each size: Python's integers would grow without limit for a hostile list.
        if total > _MAX_COUNT:
            _refuse(path, name, f"has the shape {shown(str(shape))}, whose size overflows 64 bits")
    if total % 8 or total // 8 != end - begin:
        need = f"{total // 8} bytes" if total % 8 == 0 else f"{total} bits, not whole bytes"
        _refuse(
            path, name, f"is {dtype} {shown(str(shape))}, which takes {need}, but {end - begin} are given"
        )
    return TensorEntry(name, dtype, tuple(shape), file_index, data_start + begin, end - begin)


def _refuse(path: str, name: str, reason: str) -> NoReturn:
    raise CheckpointError(f"{path}: tensor {shown(name)} {reason}: the file is malformed; download it again")


def _check_cover(entries: list[TensorEntry], data_start: int, file_size: int, path: str) -> None:
    position = data_start
    previous = ""
    for entry in entries:
        if entry.offset < position:
            _refuse(path, entry.name, f"overlaps with tensor {shown(previous)}")
        if entry.offset > position:
            _refuse(path, entry.name, f"leaves {entry.offset - position} bytes before it that no tensor owns")
        position += entry.nbytes
        previous = entry.name
    if position > file_size:
        raise CheckpointError(
            f"{path}: the file is truncated: its header describes {position} bytes, but the file has "
            f"{file_size} (tensor {shown(_first_cut(entries, file_size))} is cut off); download it "
            "again"
        )
    if position < file_size:
        raise CheckpointError(
            f"{path}: {file_size - position} bytes follow the last tensor: its header describes "
            f"{position} bytes, but the file has {file_size}; download it again"
        )


def _first_cut(entries: list[TensorEntry], file_size: int) -> str:
    return next(entry.name for entry in entries if entry.offset + entry.nbytes > file_size)
