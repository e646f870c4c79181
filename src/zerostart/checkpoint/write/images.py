"""Files as plain data before they are written: literal bytes, and rows of elements at their places.

``archived`` makes one of what ``torch.save`` would write of a value whose tensors need never be in memory.
"""

from __future__ import annotations

import struct
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from zerostart.checkpoint.formats.torch_zip import TorchArchive
from zerostart.checkpoint.storage.files import open_regular
from zerostart.upstream.torch.archives import empty_tensors, save_without_data


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` elements of tensor number ``tensor`` from ``first`` on; they go to element ``at``."""

    tensor: int
    first: int
    count: int
    at: int = 0


@dataclass(frozen=True, eq=False)
class Room:
    """A tensor of an archive whose elements are written later: ``runs``, and zeros where there are none.

    One that is in a value twice is one tensor there, too.
    """

    dtype: torch.dtype
    shape: Sequence[int]
    runs: Sequence[Run]


@dataclass(frozen=True, slots=True)
class Row:
    """Elements of one tensor, one after the other, in a file: the first is at byte ``offset``."""

    tensor: int
    first: int
    count: int
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Checked:
    """Bytes of a file whose CRC-32 stands, in four bytes, at ``places`` of the file."""

    offset: int
    nbytes: int
    places: tuple[int, ...]


@dataclass(frozen=True)
class Image:
    """One file: its name with slashes, its bytes, what is known of them, and what is read into the rest."""

    name: str
    size: int
    literals: tuple[tuple[int, bytes], ...] = ()
    rows: tuple[Row, ...] = ()
    checked: tuple[Checked, ...] = field(default=())

    def at(self, offset: int) -> Image:
        """The same as a part of another file, from byte ``offset`` on."""
        return replace(
            self,
            literals=tuple((place + offset, data) for place, data in self.literals),
            rows=tuple(replace(row, offset=row.offset + offset) for row in self.rows),
            checked=tuple(
                Checked(one.offset + offset, one.nbytes, tuple(place + offset for place in one.places))
                for one in self.checked
            ),
        )


#: Where archives begin in a file of several: storages lie at such multiples in each.
_ALIGNED = 64


def joined(name: str, parts: Iterable[Image]) -> tuple[Image, list[tuple[int, int]]]:
    """A file of several ones behind each other, and where each begins and how long it is."""
    literals: list[tuple[int, bytes]] = []
    rows: list[Row] = []
    checked: list[Checked] = []
    places: list[tuple[int, int]] = []
    end = 0
    for part in parts:
        end += -end % _ALIGNED
        moved = part.at(end)
        literals += moved.literals
        rows += moved.rows
        checked += moved.checked
        places.append((end, part.size))
        end += part.size
    return Image(name, end, tuple(literals), tuple(rows), tuple(checked)), places


#: The central directory's entry: what is before the CRC, the CRC, sizes, lengths, and where the header is.
_ENTRY = struct.Struct("<4s12xL2L3H8xL")
_DESCRIPTOR = b"PK\7\x08"


def archived(name: str, value: object, scratch: Path) -> Image:
    """The file that ``torch.save`` writes of ``value``, in which each ``Room`` is a tensor.

    The room's elements are rows. Other tensors are small, and written as they are. A file without data is
    made in the directory ``scratch`` and removed. Raises OSError.
    """
    rooms: list[Room | torch.Tensor] = []
    seen: dict[int, int] = {}
    for item in _tensors(value):
        if id(item) not in seen:
            seen[id(item)] = len(rooms)
            rooms.append(item)
    made = empty_tensors([(room.dtype, tuple(room.shape)) for room in rooms])
    stand = {key: made[number] for key, number in seen.items()}
    # The name of the file is in the archive, which is to be the same whenever it is made.
    with tempfile.TemporaryDirectory(prefix="archive-", dir=scratch) as folder:
        path = Path(folder) / "archive"
        save_without_data(_replaced(value, stand), path)
        return _image(name, path, rooms)


def _image(name: str, path: Path, rooms: Sequence[Room | torch.Tensor]) -> Image:
    """The archive in ``path``, in which storage number n is that of the room number n."""
    with open_regular(str(path), "torch") as (handle, size):
        places = TorchArchive(handle, size, str(path)).storages(len(rooms))
        literals: list[tuple[int, bytes]] = []
        checked: list[Checked] = []
        rows: list[Row] = []
        end = 0
        for begin, nbytes in sorted(places):
            literals.append((end, handle.read(begin - end, end)))
            end = begin + nbytes
        literals.append((end, handle.read(size - end, end)))
        crcs = _crc_places(literals[-1][0], literals[-1][1], dict(places), handle)
    for room, (begin, nbytes) in zip(rooms, places, strict=True):
        if isinstance(room, torch.Tensor):
            data = room.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            literals.append((begin, data))
            crc = struct.pack("<L", zlib.crc32(data))
            literals += [(place, crc) for place in crcs.get(begin, ())]
            continue
        width = room.dtype.itemsize
        rows += [
            Row(run.tensor, run.first, run.count, begin + run.at * width, room.dtype)
            for run in room.runs
            if run.count
        ]
        if nbytes:
            checked.append(Checked(begin, nbytes, crcs[begin]))
    assert all(
        nbytes == prod(room.shape) * room.dtype.itemsize
        for room, (_, nbytes) in zip(rooms, places, strict=True)
    )
    return Image(name, size, tuple(literals), tuple(rows), tuple(checked))


def _crc_places(begin: int, tail: bytes, storages: dict[int, int], handle: Any) -> dict[int, tuple[int, ...]]:
    """For each storage, by where its bytes begin, where its CRC stands: behind it, and in the directory."""
    found: dict[int, tuple[int, ...]] = {}
    at = tail.find(b"PK\1\2")
    while at >= 0 and tail[at : at + 4] == b"PK\1\2":
        _, _, _, _, name, extra, comment, header = _ENTRY.unpack_from(tail, at)
        wide = tail[at + 46 + name : at + 46 + name + extra]
        if header == 0xFFFFFFFF:
            # Of 64 bits: those of sizes and of the place that have no room in the entry, in this order.
            skip = (
                4
                + 8 * (tail[at + 20 : at + 24] == b"\xff" * 4)
                + 8 * (tail[at + 24 : at + 28] == b"\xff" * 4)
            )
            header = int.from_bytes(wide[skip : skip + 8], "little")
        lengths = handle.read(30, header)
        data = (
            header + 30 + int.from_bytes(lengths[26:28], "little") + int.from_bytes(lengths[28:30], "little")
        )
        if data in storages:
            after = data + storages[data]
            places = [begin + at + 16]
            if handle.read(4, after) == _DESCRIPTOR:
                places.append(after + 4)
            found[data] = tuple(places)
        at += 46 + name + extra + comment
    return found


def _tensors(value: object) -> Iterator[Room | torch.Tensor]:
    """Rooms and tensors in the order in which they are pickled."""
    if isinstance(value, (Room, torch.Tensor)):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif type(value) in (list, tuple):
        for item in value:  # type: ignore[attr-defined]  # which type() does not narrow
            yield from _tensors(item)


def _replaced(value: Any, made: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, (Room, torch.Tensor)):
        return made[id(value)]
    if isinstance(value, dict):
        return type(value)((key, _replaced(item, made)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, made) for item in value)
    return value


def crc_combined(first: int, second: int, length: int) -> int:
    """The CRC-32 of two runs of bytes, of which the second has ``length``, from those of each.

    Source: ``crc32_combine`` of zlib, by powers of the polynomial modulo the CRC's own.
    """
    return _times(_power(length), first) ^ second


_POLYNOMIAL = 0xEDB88320


def _times(a: int, b: int) -> int:
    """The product of two polynomials over GF(2) modulo that of the CRC, both with reflected bits."""
    product, mask = 0, 1 << 31
    while mask:
        if a & mask:
            product ^= b
        mask >>= 1
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def _squares() -> list[int]:
    found = [1 << 30]  # x
    for _ in range(66):
        found.append(_times(found[-1], found[-1]))
    return found


_SQUARES = _squares()


def _power(length: int) -> int:
    """x to the power of eight times ``length``."""
    product, place = 1 << 31, 3
    while length:
        if length & 1:
            product = _times(_SQUARES[place], product)
        length >>= 1
        place += 1
    return product


def zeros_crc(length: int) -> int:
    """The CRC-32 of ``length`` zeros."""
    return crc_combined(0xFFFFFFFF, 0, length) ^ 0xFFFFFFFF if length else 0
