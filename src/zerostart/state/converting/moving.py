"""The work of a conversion: units of elements that are read, cast, and written at their places."""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.digest import Digests
from zerostart.checkpoint.write.images import Checked, Image, Row, crc_combined, zeros_crc
from zerostart.geometry.layout.flat import flat_run
from zerostart.recipe import Recipe
from zerostart.recipe import Target as Filled
from zerostart.state.converting.targets import Target
from zerostart.state.converting.work import Journal, Work, opened, read_back, write_at, written
from zerostart.state.saving.output import WritesTensors
from zerostart.transfer import Progress, execute
from zerostart.transfer.planning import Destination, join

#: Bytes of a unit, of which two are in memory: one is read while the one before is written.
UNIT = 64 << 20
#: Where a part begins in the memory of its unit: a multiple of this.
_ALIGNED = 64


@dataclass(frozen=True, slots=True)
class Part:
    """Elements of one row of one file, read at once."""

    image: int
    row: Row

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.row.count * self.row.dtype.itemsize


def units_of(target: Target) -> list[list[Part]]:
    """All rows of all files in order, in units of at most ``UNIT`` bytes."""
    units: list[list[Part]] = []
    unit: list[Part] = []
    room = UNIT
    for number, image in enumerate(target.images):
        for row in image.rows:
            width = row.dtype.itemsize
            done = 0
            while done < row.count:
                # Also as it is stored: it is read in that type, and cast in memory.
                count = min(row.count - done, max(1, room // width))
                part = Row(row.tensor, row.first + done, count, row.offset + done * width, row.dtype)
                unit.append(Part(number, part))
                done += count
                room -= -(-count * width // _ALIGNED) * _ALIGNED
                if room < _ALIGNED:
                    units.append(unit)
                    unit, room = [], UNIT
    return [*units, unit] if unit else units


class _Reader:
    """Reads units, into one of two buffers at a time."""

    def __init__(self, target: Target, catalogs: Sequence[Catalog]) -> None:
        self._target, self._catalogs = target, catalogs
        self._rooms = [torch.empty(0, dtype=torch.uint8, device="cpu")] * 2

    def places(self, unit: Sequence[Part], number: int) -> list[torch.Tensor]:
        """Room for the bytes of each part, in one of two buffers."""
        starts, end = [], 0
        for part in unit:
            starts.append(end)
            end += -(-part.nbytes // _ALIGNED) * _ALIGNED
        if self._rooms[number].numel() < end:
            self._rooms[number] = torch.empty(end, dtype=torch.uint8, device="cpu")
        room = self._rooms[number]
        return [room[at : at + part.nbytes] for at, part in zip(starts, unit, strict=True)]

    def read(self, unit: Sequence[Part], places: Sequence[torch.Tensor]) -> None:
        """Fill the places with the elements of the parts. Raises ReadError."""
        # The machinery of a load with a single rank: conversions of dtype and shares of a training state come
        # with it.
        for number, catalog in enumerate(self._catalogs):
            wanted, storages = [], []
            for part, place in zip(unit, places, strict=True):
                stored, row = self._target.sources[part.row.tensor], part.row
                if stored.catalog != number:
                    continue
                recipe = Recipe(Filled(stored.name, stored.shape, row.dtype), stored.pieces)
                layout = flat_run(stored.shape, row.first, row.first + row.count)
                wanted.append(
                    (recipe, layout, Destination(stored.name, row.count, row.count, row.dtype, True))
                )
                storages.append(place.view(row.dtype))
            if wanted:
                plan = join(catalog, wanted)
                execute(plan, storages, Progress(plan.read_bytes, shown=False))


class Mover:
    """Does units of work of a conversion, and adds what it wrote to ``digests``."""

    def __init__(self, target: Target, catalogs: Sequence[Catalog], work: Work, digests: Digests) -> None:
        self._target, self._work, self._digests = target, work, digests
        self._reader = _Reader(target, catalogs)

    def check(self, unit: Sequence[Part], sums: Sequence[Sequence[int]]) -> bool:
        """Whether a unit that a journal says is done is in the files as it was written. Raises OSError."""
        if len(sums) != len(unit):
            return False
        places = self._reader.places(unit, 0)
        for part, place in zip(unit, places, strict=True):
            image = self._target.images[part.image]
            path = self._work.files / image.name
            if not path.exists():  # it has its name already
                path = self._work.root / image.name
            if not read_back(path, part.row.offset, place.numpy().data):
                return False
        found = [self._sums(part, place) for part, place in zip(unit, places, strict=True)]
        if found != [list(one) for one in sums]:
            return False
        self._add(unit, found)
        return True

    def move(
        self, units: Sequence[tuple[int, Sequence[Part]]], damaged: Collection[int] = ()
    ) -> dict[int, list[list[int]]]:
        """Do units, by their numbers; gives the sums of their parts. Raises ReadError and OSError.

        What is zero stays a hole of its file, but for units that are ``damaged``, whose files have other
        bytes.
        """
        made: dict[int, list[list[int]]] = {}
        journal = Journal(self._work.place)
        try:
            with ThreadPoolExecutor(1, "zerostart-converting") as writer:
                before: Future[list[list[int]]] | None = None
                for turn, (number, unit) in enumerate(units):
                    places = self._reader.places(unit, turn % 2)
                    self._reader.read(unit, places)
                    if before is not None:
                        made[units[turn - 1][0]] = before.result()
                    before = writer.submit(self._write, journal, number, unit, places, number in damaged)
                if before is not None:
                    made[units[-1][0]] = before.result()
        finally:
            journal.close()
        return made

    def _write(
        self,
        journal: Journal,
        number: int,
        unit: Sequence[Part],
        places: Sequence[torch.Tensor],
        damaged: bool,
    ) -> list[list[int]]:
        for part, place in zip(unit, places, strict=True):
            # The beginning first: it tells nearly always.
            if not damaged and not place[:_ALIGNED].any() and not place.any():
                continue
            path = self._work.files / self._target.images[part.image].name
            written(path, part.row.offset, place.numpy().data)
        sums = [self._sums(part, place) for part, place in zip(unit, places, strict=True)]
        # After the bytes: a journal says nothing that is not in the files.
        journal.note(number, sums)
        self._add(unit, sums)
        return sums

    def _sums(self, part: Part, data: torch.Tensor) -> list[int]:
        """What tells the bytes of a part: the sums of a digest, or a CRC-32 where the file has one."""
        if name := self._target.names[part.row.tensor]:
            return self._digests.lanes(name, part.row.first, data)
        return [zlib.crc32(data.numpy().data)]

    def _add(self, unit: Sequence[Part], sums: Sequence[Sequence[int]]) -> None:
        for part, of in zip(unit, sums, strict=True):
            if name := self._target.names[part.row.tensor]:
                self._digests.add_lanes(name, part.row.count, of)


def give(target: Target, catalogs: Sequence[Catalog], writer: WritesTensors, digests: Digests) -> None:
    """Give ``writer`` all elements of safetensors files, in their order, and add them to ``digests``.

    Raises ReadError and WriteError.
    """
    reader = _Reader(target, catalogs)
    for unit in units_of(target):
        places = reader.places(unit, 0)
        reader.read(unit, places)
        for part, place in zip(unit, places, strict=True):
            name, row = target.names[part.row.tensor], part.row
            digests.add_lanes(name, row.count, digests.lanes(name, row.first, place))
            writer.write(name, place.numpy().data, row.first * row.dtype.itemsize)


def write_checksums(
    target: Target, work: Work, units: Sequence[Sequence[Part]], sums: Sequence[Sequence[Sequence[int]]]
) -> None:
    """Write the CRC-32 of each storage of an archive, from those of the parts that it was written in."""
    crcs: dict[int, list[tuple[int, int, int]]] = {}
    for unit, of in zip(units, sums, strict=True):
        for part, one in zip(unit, of, strict=True):
            if not target.names[part.row.tensor]:
                crcs.setdefault(part.image, []).append((part.row.offset, part.nbytes, one[0]))
    for number, image in enumerate(target.images):
        if not image.checked or not (path := work.files / image.name).exists():
            continue
        known = deque(sorted(crcs.get(number, ())))
        with opened(path, os.O_WRONLY) as handle:
            for checked in sorted(image.checked, key=lambda one: one.offset):
                inside = []
                while known and known[0][0] < checked.offset + checked.nbytes:
                    inside.append(known.popleft())
                value = _crc(checked, inside).to_bytes(4, "little")
                for place in checked.places:
                    write_at(handle, memoryview(value), place)


def _crc(checked: Checked, parts: Sequence[tuple[int, int, int]]) -> int:
    """The CRC-32 of a run of bytes, of parts with known ones and zeros between them."""
    at, crc = checked.offset, 0
    end = checked.offset + checked.nbytes
    for begin, nbytes, value in (*parts, (end, 0, 0)):
        if begin > at:
            crc = crc_combined(crc, zeros_crc(begin - at), begin - at)
        crc, at = crc_combined(crc, value, nbytes), begin + nbytes
    return crc


def image_bytes(images: Sequence[Image]) -> int:
    """Bytes of all files."""
    return sum(image.size for image in images)
