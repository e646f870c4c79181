"""The work of a conversion: spans of files, and the elements that are read, cast and put into them."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.digest import Digests
from zerostart.checkpoint.storage import Storage
from zerostart.checkpoint.storage.uploads import parts_of
from zerostart.checkpoint.write.images import Checked, Image, crc_combined, zeros_crc
from zerostart.geometry.layout import Layout
from zerostart.geometry.layout.flat import flat_run
from zerostart.recipe import Recipe
from zerostart.recipe import Target as Filled
from zerostart.state.converting.targets import Target
from zerostart.transfer import Progress, execute, tune
from zerostart.transfer.planning import Destination, PlanOptions, join

#: Most bytes of one read, and of what a thread takes beside a unit for elements that are cast.
CHUNK = 4 << 20
#: What is read, which elements of it, and into what.
Wanted = tuple[Recipe, Layout, Destination]
#: What tells the bytes of a part: the sums of a digest, or one CRC-32 where the file has that.
Sums = list[int]


@dataclass(frozen=True, slots=True)
class Part:
    """What a span has of one row of its file: elements of one tensor that follow each other."""

    tensor: int
    dtype: torch.dtype
    #: The elements that are read.
    first: int
    count: int
    #: Bytes of the first of them that lie before the span, as those of the last may lie behind it.
    lead: int
    #: Where the others are in the file, and how many.
    offset: int
    nbytes: int

    @property
    def begun(self) -> int:
        """How many of the elements begin here, so that each is counted once."""
        return self.count - bool(self.lead)


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of one file, from ``begin`` to ``end``, with what of its rows lies in them."""

    image: int
    begin: int
    end: int
    parts: tuple[Part, ...]


def spans_of(number: int, image: Image, length: int) -> Iterator[Span]:
    """The file ``image``, which is that of this number, in spans of ``length`` bytes."""
    rows = deque(sorted(image.rows, key=lambda row: row.offset))
    for begin, nbytes in parts_of(image.size, length):
        end = begin + nbytes
        parts = []
        while rows and rows[0].offset < end:
            row, width = rows[0], rows[0].dtype.itemsize
            stop = row.offset + row.count * width
            low, high = max(row.offset, begin) - row.offset, min(stop, end) - row.offset
            first = low // width
            parts.append(
                Part(
                    row.tensor,
                    row.dtype,
                    row.first + first,
                    -(-high // width) - first,
                    low - first * width,
                    row.offset + low,
                    high - low,
                )
            )
            if stop > end:
                break
            rows.popleft()
        yield Span(number, begin, end, tuple(parts))


class Filler:
    """Reads the parts of spans; safe to share between threads."""

    def __init__(self, target: Target, catalogs: Sequence[Catalog], digests: Digests, threads: int) -> None:
        """Of ``threads`` that fill spans at once each has others that read, where the storage wants more."""
        self.target, self._catalogs, self._digests = target, catalogs, digests
        self._readings = [_Reading.of(catalog.storage, threads) for catalog in catalogs]

    def fill(self, spans: Sequence[Span], rooms: Sequence[torch.Tensor]) -> None:
        """Put the elements of all parts into ``rooms``, the bytes of each span. Raises ReadError."""
        # The machinery of a load with a single rank: conversions of dtype and shares of a training state come
        # with it.
        for number, catalog in enumerate(self._catalogs):
            wanted: list[Wanted] = []
            places: list[torch.Tensor] = []
            cut: list[tuple[torch.Tensor, torch.Tensor]] = []
            for span, room in zip(spans, rooms, strict=True):
                for part in span.parts:
                    stored = self.target.sources[part.tensor]
                    if stored.catalog != number:
                        continue
                    place = bytes_of(part, span, room)
                    width = part.dtype.itemsize
                    if part.nbytes != part.count * width or place.storage_offset() % width:
                        # Elements that a span cuts, or that do not lie at multiples of their width.
                        whole = torch.empty(part.count * width, dtype=torch.uint8, device="cpu")
                        cut.append((place, whole[part.lead : part.lead + part.nbytes]))
                        place = whole
                    recipe = Recipe(Filled(stored.name, stored.shape, part.dtype), stored.pieces)
                    layout = flat_run(stored.shape, part.first, part.first + part.count)
                    described = Destination(stored.name, part.count, part.count, part.dtype, True)
                    wanted.append((recipe, layout, described))
                    places.append(place.view(part.dtype))
            if wanted:
                self._readings[number].read(catalog, wanted, places)
            for place, of in cut:
                place.copy_(of)

    def sums(self, part: Part, data: torch.Tensor) -> Sums:
        """What tells the bytes of a part."""
        if name := self.target.names[part.tensor]:
            return self._digests.lanes(name, part.first, data, part.lead)
        return [zlib.crc32(data.numpy().data)]

    def add(self, parts: Iterable[Part], sums: Iterable[Sums]) -> None:
        """Add what is written to the digests of its tensors."""
        for part, of in zip(parts, sums, strict=True):
            if name := self.target.names[part.tensor]:
                self._digests.add_lanes(name, part.begun, of)


@dataclass(frozen=True)
class _Reading:
    """How one storage is read: by how many threads for each span, and whether round the page cache."""

    options: PlanOptions
    threads: int
    cold: bool
    direct: bool

    @classmethod
    def of(cls, storage: Storage, together: int) -> _Reading:
        tuned = tune(storage, False)
        options = tuned.options(min(tuned.chunk_size, CHUNK))
        return cls(options, max(1, tuned.threads // together), tuned.cold, tuned.direct)

    def read(self, catalog: Catalog, wanted: Iterable[Wanted], places: Sequence[torch.Tensor]) -> None:
        plan = join(catalog, wanted, self.options)
        reader = plan.storage.reader(cold=self.cold, direct=self.direct)
        execute(plan, places, Progress(plan.read_bytes, shown=False), self.threads, reader)


def bytes_of(part: Part, span: Span, room: torch.Tensor) -> torch.Tensor:
    """The bytes of a part in those of its span."""
    return room[part.offset - span.begin :][: part.nbytes]


def put_literals(literals: Iterable[tuple[int, bytes]], begin: int, end: int, data: torch.Tensor) -> None:
    """Put those bytes that lie from ``begin`` to ``end`` of a file into ``data``, which begins there."""
    for offset, piece in literals:
        low, high = max(offset, begin), min(offset + len(piece), end)
        if low < high:
            cut = bytearray(piece[low - offset : high - offset])
            data[low - begin : high - begin] = torch.frombuffer(cut, dtype=torch.uint8)


class Checksums:
    """The CRC-32 of each storage of an archive, from those of the parts that it is written in."""

    def __init__(self, target: Target, image: Image) -> None:
        self._target, self._image = target, image
        self._parts: list[tuple[int, int, int]] = []

    def add(self, parts: Iterable[Part], sums: Iterable[Sums]) -> None:
        """Note what is in the file."""
        for part, of in zip(parts, sums, strict=True):
            if not self._target.names[part.tensor]:
                self._parts.append((part.offset, part.nbytes, of[0]))

    def literals(self, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, bytes]]:
        """Where in the file between two places which bytes of a checksum stand."""
        end = self._image.size if end is None else end
        wanted = {
            checked.offset: [place for place in checked.places if begin - 4 < place < end]
            for checked in self._image.checked
        }
        if not any(wanted.values()):
            return
        known = deque(sorted(self._parts))
        for checked in sorted(self._image.checked, key=lambda one: one.offset):
            inside = []
            while known and known[0][0] < checked.offset + checked.nbytes:
                inside.append(known.popleft())
            if places := wanted[checked.offset]:
                value = _crc(checked, inside).to_bytes(4, "little")
                yield from ((place, value) for place in places)


def _crc(checked: Checked, parts: Iterable[tuple[int, int, int]]) -> int:
    """The CRC-32 of a run of bytes, of parts with known ones and zeros between them."""
    at, crc = checked.offset, 0
    end = checked.offset + checked.nbytes
    for begin, nbytes, value in (*parts, (end, 0, 0)):
        if begin > at:
            crc = crc_combined(crc, zeros_crc(begin - at), begin - at)
        crc, at = crc_combined(crc, value, nbytes), begin + nbytes
    return crc
