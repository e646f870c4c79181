"""The directory of a zip file: which bytes hold which record. Stored records only.

A strict reader of what ``torch.save`` writes, and of no more: one archive from the first byte to the last,
nothing compressed, encrypted, twice there, or overlapping. Python's own ``zipfile`` is more tolerant than
a file from a stranger deserves, and reads a directory of any size.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from zerostart.checkpoint.storage.base import HeaderBytes
from zerostart.checkpoint.strict_json import DAMAGED, shown
from zerostart.errors import CheckpointError

__all__ = ["Record", "ZipIndex", "read_zip_index"]

#: A record takes about 100 bytes of the directory: enough for half a million tensors in one file.
MAX_DIRECTORY_BYTES = 1 << 26
MAX_RECORDS = 600_000
_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_ZIP64_EXTRA = 1
_ENCRYPTED = 0x0001
#: Sizes follow the data, and the name is UTF-8: the flags that torch sets.
_KNOWN_FLAGS = 0x0808


@dataclass(frozen=True, slots=True)
class Record:
    """One stored file of an archive: its header begins at ``header``, the next thing behind it at ``end``."""

    name: str
    header: int
    nbytes: int
    end: int


@dataclass(frozen=True)
class ZipIndex:
    """The records of an open archive by name."""

    handle: HeaderBytes
    path: str
    records: Mapping[str, Record]

    def locate(self, name: str) -> tuple[int, int]:
        """Offset in the file and length of a record's data, in bytes.

        Raises CheckpointError if the record's own header contradicts the directory, KeyError without one.
        """
        record = self.records[name]
        raw = self.handle.read(_LOCAL.size, record.header)
        if len(raw) < _LOCAL.size or raw[:4] != b"PK\3\4":
            _refuse(self.path, name, "has no header where the directory says")
        _, _, _, method, _, _, _, _, _, name_length, extra_length = _LOCAL.unpack(raw)
        stored_name = self.handle.read(name_length, record.header + _LOCAL.size)
        if method != 0 or stored_name != name.encode():
            _refuse(self.path, name, "has a header that contradicts the directory")
        offset = record.header + _LOCAL.size + name_length + extra_length
        if offset + record.nbytes > record.end:
            _refuse(self.path, name, "reaches into what follows it")
        return offset, record.nbytes

    def read(self, name: str, limit: int) -> bytes:
        """A record's data; raises CheckpointError if it is longer than ``limit`` bytes."""
        offset, length = self.locate(name)
        if length > limit:
            raise CheckpointError(
                f"{self.path}: record {shown(name)} has {length} bytes, beyond the limit of {limit}: "
                f"{DAMAGED}"
            )
        return self.handle.read(length, offset)


def read_zip_index(handle: HeaderBytes, size: int, path: str) -> ZipIndex:
    """The directory of the archive of ``size`` bytes that is open as ``handle``.

    Raises CheckpointError, naming the record, unless every entry is right and none overlaps another.
    """
    start, length, count = _directory(handle, size, path)
    if length > MAX_DIRECTORY_BYTES:
        raise CheckpointError(
            f"{path}: a directory of {length} bytes is beyond the limit of {MAX_DIRECTORY_BYTES}: {DAMAGED}"
        )
    if count > MAX_RECORDS:
        raise CheckpointError(f"{path}: {count} records are beyond the limit of {MAX_RECORDS}: {DAMAGED}")
    raw = handle.read(length, start)
    entries: dict[str, tuple[int, int]] = {}
    at = 0
    while at < len(raw):
        name, header, nbytes, at = _entry(raw, at, path)
        if name in entries:
            _refuse(path, name, "is there twice")
        entries[name] = (header, nbytes)
    if at != length or len(entries) != count or not entries:
        raise CheckpointError(f"{path}: the archive's directory contradicts its end record: {DAMAGED}")
    order = sorted(header for header, _ in entries.values())
    if len(set(order)) < len(order):
        raise CheckpointError(f"{path}: two records of the archive lie in one place: {DAMAGED}")
    after = dict(zip(order, [*order[1:], start], strict=True))
    records = {}
    for name, (header, nbytes) in entries.items():
        if header + _LOCAL.size + len(name.encode()) + nbytes > after[header]:
            _refuse(path, name, "overlaps with another, or reaches beyond the data")
        records[name] = Record(name, header, nbytes, after[header])
    return ZipIndex(handle, path, records)


def _directory(handle: HeaderBytes, size: int, path: str) -> tuple[int, int, int]:
    """Offset, length and number of entries of the directory, from the record at the end of the file."""
    end = size - _END.size
    raw = handle.read(_END.size, end) if end >= 0 else b""
    if raw[:4] != b"PK\5\6":
        raise CheckpointError(f"{path}: the archive is truncated: no end record; download it again")
    _, disk, first_disk, here, count, length, start, comment = _END.unpack(raw)
    stop = end
    if _FULL16 in (here, count) or _FULL32 in (length, start):
        stop, disk, first_disk, here, count, length, start = _directory64(handle, end, path)
    if disk or first_disk or here != count or comment or start + length > stop:
        raise CheckpointError(f"{path}: the archive's end record makes no sense: {DAMAGED}")
    return start, length, count


def _directory64(handle: HeaderBytes, end: int, path: str) -> tuple[int, ...]:
    """Where the 64-bit end record lies, and its fields."""
    at = end - _LOCATOR.size
    raw = handle.read(_LOCATOR.size, at) if at >= 0 else b""
    if raw[:4] == b"PK\6\7":
        _, _, where, _ = _LOCATOR.unpack(raw)
        if where + _END64.size <= at:
            raw = handle.read(_END64.size, where)
            if raw[:4] == b"PK\6\6":
                _, _, _, _, disk, first_disk, here, count, length, start = _END64.unpack(raw)
                return where, disk, first_disk, here, count, length, start
    raise CheckpointError(f"{path}: the archive has no valid 64-bit end record: {DAMAGED}")


def _entry(raw: bytes, at: int, path: str) -> tuple[str, int, int, int]:
    """Name, header offset and data size of one directory entry, and where the next one begins."""
    if len(raw) - at < _CENTRAL.size or raw[at : at + 4] != b"PK\1\2":
        raise CheckpointError(f"{path}: the archive's directory is damaged at byte {at}: {DAMAGED}")
    fields = _CENTRAL.unpack_from(raw, at)
    flags, method = fields[3:5]
    packed, nbytes, name_length, extra_length, comment_length = fields[8:13]
    header = fields[16]
    at += _CENTRAL.size
    name = _name(raw[at : at + name_length], path)
    extra = raw[at + name_length : at + name_length + extra_length]
    nbytes, packed, header = _wide(extra, (nbytes, packed, header), name, path)
    if flags & _ENCRYPTED:
        _refuse(path, name, "is encrypted; save the weights again without")
    if method != 0 or packed != nbytes:
        _refuse(
            path,
            name,
            "is compressed, as in TorchScript programs and never by torch.save; save the state dict with it",
        )
    if flags & ~_KNOWN_FLAGS or fields[13]:
        _refuse(path, name, "has properties that torch.save never gives")
    return name, header, nbytes, at + name_length + extra_length + comment_length


def _name(raw: bytes, path: str) -> str:
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: the archive holds a record with an undecodable name") from error
    if not name or name.startswith("/") or ".." in name.split("/") or "\\" in name or "\0" in name:
        _refuse(path, name, "has a name that leads elsewhere; do not load this checkpoint")
    return name


def _wide(extra: bytes, values: tuple[int, ...], name: str, path: str) -> tuple[int, ...]:
    """Replace what does not fit 32 bits by the values of the zip64 field."""
    at = 0
    wide: Iterator[int] = iter(())
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == _ZIP64_EXTRA:
            field = extra[at + 4 : at + 4 + length]
            wide = iter(struct.unpack_from(f"<{len(field) // 8}Q", field))
        at += 4 + length
    found = tuple(next(wide, -1) if value == _FULL32 else value for value in values)
    if -1 in found:
        _refuse(path, name, "is said to be larger than 4 GiB, but by how much is missing")
    return found


def _refuse(path: str, name: str, reason: str) -> NoReturn:
    raise CheckpointError(f"{path}: record {shown(name)} {reason}")
