"""Weights from the ranks that have them to those that ask for them, a bounded part of the image at a time.

In each round every rank says which bands of the image it wants next. Of these each rank puts in what its
shards have, and ranks send each other the rest. So nobody has more than some bands, and nothing is gathered.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import torch
import torch.distributed as dist

from zerostart.checkpoint.catalog import TensorEntry
from zerostart.checkpoint.write.shards import SaveLayout
from zerostart.distributed.world import World
from zerostart.recipe import torch_dtype
from zerostart.state.refitting.image import Image
from zerostart.state.refitting.pushes import CHUNK
from zerostart.state.refitting.sums import SetSums
from zerostart.state.refitting.transports.base import ImageWriter
from zerostart.transfer.planning.runs import Runs
from zerostart.transfer.planning.writes import Write, WritePlan
from zerostart.transfer.staging import copy_strided
from zerostart.transfer.tuning import push_threads
from zerostart.transfer.writing import Source, write_out

T = TypeVar("T")
#: Bytes of the image that a rank asks for at a time, beside what the last thing that needs them reaches over.
BAND = 32 << 20
#: Bytes of the image, the first and one past the last; both are edges of windows.
Range = tuple[int, int]


class Windows:
    """Where the windows of an image begin, which no write crosses; see ``plan_writes``."""

    def __init__(self, layout: SaveLayout) -> None:
        edges: list[int] = []
        for entry in sorted(layout.tensors.values(), key=lambda entry: entry.offset):
            if entry.nbytes:
                edges += _windows(entry, CHUNK)
        self._edges = [*edges, layout.files[0].size]

    def batches(self, items: Iterable[tuple[T, Sequence[Range]]]) -> Iterator[tuple[list[T], list[Range]]]:
        """Items that each need some bytes, in their order, as many at a time as ``BAND`` allows.

        With them the windows that these bytes are in.
        """
        batch: list[T] = []
        windows: set[int] = set()
        size = 0
        for item, needs in items:
            more = {window for low, high in needs for window in self._touched(low, high)} - windows
            added = sum(self._edges[n + 1] - self._edges[n] for n in more)
            if batch and size + added > BAND:
                yield batch, self._joined(windows)
                batch, windows, size = [], set(), 0
                more = {window for low, high in needs for window in self._touched(low, high)}
                added = sum(self._edges[n + 1] - self._edges[n] for n in more)
            batch.append(item)
            windows |= more
            size += added
        if batch:
            yield batch, self._joined(windows)

    def all(self) -> Iterator[list[Range]]:
        """The whole image, in parts of ``BAND`` bytes: the same on every rank."""
        windows = ((None, [(low, high)]) for low, high in pairwise(self._edges))
        yield from (ranges for _, ranges in self.batches(windows))

    def _touched(self, low: int, high: int) -> range:
        return range(bisect_right(self._edges, low) - 1, bisect_left(self._edges, high))

    def _joined(self, windows: set[int]) -> list[Range]:
        found: list[Range] = []
        for number in sorted(windows):
            low, high = self._edges[number], self._edges[number + 1]
            if found and found[-1][1] == low:
                low = found.pop()[0]
            found.append((low, high))
        return found


def _windows(entry: TensorEntry, chunk: int) -> list[int]:
    """Where the windows of a tensor begin in the image."""
    width = torch_dtype(entry.dtype, entry.name).itemsize
    size = max(1, chunk // width) * width
    return list(range(entry.offset, entry.offset + entry.nbytes, size))


class Band(ImageWriter):
    """A part of the image in memory."""

    def __init__(self, layout: SaveLayout, low: int, high: int, device: torch.device) -> None:
        super().__init__(layout)
        self.low, self.high = low, high
        # Elements lie as in the file, and there at multiples of their size.
        self._base = low - low % 64
        self._data = torch.empty(high - self._base, dtype=torch.uint8, device=device)

    def put(self, place: int, data: torch.Tensor, length: int, step: int, rows: int) -> None:
        """Copy to where it lies in the image."""
        self.rows(place, length, step, rows).copy_(data.as_strided((rows, length), (step, 1)))

    def pack(self, runs: Runs, out: torch.Tensor) -> None:
        """The bytes of ``runs``, one after the other."""
        done = 0
        for start, width, stride, count in runs.rows.tolist():
            part = out[done : done + width * count]
            part.view(count, width).copy_(self.rows(start, width, stride, count))
            done += width * count

    def unpack(self, runs: Runs, packed: torch.Tensor) -> None:
        """What ``pack`` has made, back in its places."""
        done = 0
        for start, width, stride, count in runs.rows.tolist():
            part = packed[done : done + width * count]
            self.rows(start, width, stride, count).copy_(part.view(count, width))
            done += width * count

    def elements(self, write: Write) -> torch.Tensor:
        """The span of a write, 1-D."""
        width = write.dtype.itemsize
        begin = self._tensors[write.name].offset + write.first * width - self._base
        return self._data[begin : begin + write.span * width].view(write.dtype)

    def rows(self, start: int, width: int, stride: int, count: int) -> torch.Tensor:
        """Rows of bytes as they lie here, [count, width]."""
        return self._data.as_strided((count, width), (stride or width, 1), start - self._base)


@dataclass(frozen=True)
class Routes:
    """Who has, wants, and gets what of an image: the same for every push that finds both sides alike."""

    image: Image
    #: Bytes that this rank wants.
    wants: Runs
    #: By rank: what this one sends it, and what it gets from it.
    sends: Sequence[Runs]
    receives: Sequence[Runs]
    #: Bytes that all ranks send, and that all of them want.
    moved: int
    wanted: int

    @classmethod
    def of(cls, image: Image, owns: Sequence[Runs], wants: Sequence[Runs], rank: int) -> Routes:
        """Of what each rank has, disjoint, and what each wants."""
        stays = sum(own.intersect(want).nbytes for own, want in zip(owns, wants, strict=True))
        total = sum(runs.nbytes for runs in wants)
        return cls(
            image,
            wants[rank],
            [owns[rank].intersect(runs) for runs in wants],
            [runs.intersect(wants[rank]) for runs in owns],
            total - stays,
            total,
        )


class Rounds:
    """The rounds of one push. Every rank calls ``bring`` as often as it likes, and then ``finish``."""

    def __init__(
        self,
        routes: Routes,
        source: WritePlan,
        storages: Sequence[Source],
        sums: SetSums,
        world: World,
        device: torch.device,
    ) -> None:
        """``source`` is what this rank has, in ``storages``. Bands lie on ``device``, and travel from there.

        Each element that anybody asks for is added to ``sums``, once.
        """
        self.windows = Windows(routes.image.layout)
        self._routes, self._source, self._storages = routes, source, storages
        self._sums, self._world, self._device = sums, world, device
        if device.type != "cpu":
            # What was computed last may still be under way, on another stream than the current one.
            torch.accelerator.synchronize(device)
        tensors = routes.image.layout.tensors
        self._places = [tensors[w.name].offset + w.first * w.dtype.itemsize for w in source.writes]
        self._summed = bytearray(len(source.writes))

    @property
    def image(self) -> Image:
        """What is brought is of this."""
        return self._routes.image

    def bring(self, asked: Sequence[Range]) -> list[Band]:
        """Bands of what is ``asked`` for, which is disjoint, with all that this rank wants of it; collective.

        Raises what another rank has failed with.
        """
        if self._world.size == 1:
            return [self._put_in(*each) for each in asked]
        everybody: list[list[Range] | None] = self._world.all_gather_object(list(asked), "asking for weights")
        return self._exchanged(everybody)

    def finish(self) -> None:
        """Give the others what they ask for, until nobody asks any more; collective. Raises as ``bring``."""
        while self._world.size > 1:
            everybody: list[list[Range] | None] = self._world.all_gather_object(None, "asking for weights")
            if all(asked is None for asked in everybody):
                return
            self._exchanged(everybody)

    def _exchanged(self, everybody: Sequence[list[Range] | None]) -> list[Band]:
        asked = [each or [] for each in everybody]
        with self._world.collectives("sending weights", lambda: self._packed(asked)) as messages:
            dist.all_to_all_single(
                messages.incoming,
                messages.outgoing,
                messages.gets,
                messages.gives,
                group=self._world.group if self._device.type == "cpu" else None,
            )
        return messages.delivered()  # type: ignore[no-any-return]  # made by _packed

    def _packed(self, asked: Sequence[Sequence[Range]]) -> _Messages:
        """What this rank sends of what is asked for, and room for what it gets."""
        rank, size = self._world.rank, self._world.size
        gives = _Parcels([self._routes.sends[n] for n in range(size)], asked, rank)
        gets = _Parcels(self._routes.receives, [asked[rank]] * size, rank)
        outgoing = torch.empty(gives.nbytes, dtype=torch.uint8, device=self._device)
        bands: dict[Range, Band] = {}
        for each in dict.fromkeys(each for ranges in asked for each in ranges):
            mine, parcels = each in asked[rank], gives.of(each)
            if not mine and not parcels:
                continue
            band = self._put_in(*each)
            for runs, place in parcels:
                band.pack(runs, outgoing[place : place + runs.nbytes])
            if mine:
                bands[each] = band
        incoming = torch.empty(gets.nbytes, dtype=torch.uint8, device=self._device)
        return _Messages(bands, outgoing, gives.sizes, incoming, gets.sizes, gets)

    def _put_in(self, low: int, high: int) -> Band:
        """A band with what this rank's shards have of it."""
        band = Band(self._routes.image.layout, low, high, self._device)
        numbers = range(bisect_left(self._places, low), bisect_left(self._places, high))
        fresh = [n for n in numbers if not self._summed[n]]
        again = [n for n in numbers if self._summed[n]]
        for chosen, noted in ((fresh, self._sums.add_rows), (again, None)):
            writes = tuple(self._source.writes[n] for n in chosen)
            if self._device.type == "cpu":
                write_out(replace(self._source, writes=writes), self._storages, band, push_threads(), noted)
                continue
            for write in writes:
                self._put_there(write, band.elements(write), sums=noted is not None)
        for number in fresh:
            self._summed[number] = 1
        return band

    def _put_there(self, write: Write, window: torch.Tensor, sums: bool) -> None:
        """The same for one write on an accelerator, by itself: nothing of it comes to the host."""
        with torch.no_grad():
            for part in write.parts:
                # A write is a read run backwards.
                loops = [(size, local, far) for size, far, local in part.loops]
                count = 1 + sum((size - 1) * local for size, local, _ in loops)
                held = self._storages[part.target].elements(part.to, count)
                copy_strided(window, part.at // part.dtype.itemsize, held, loops)
        if sums:
            for first, count, step, rows in write.rows():
                seen = window.as_strided((rows, count), (step, 1), int(window.storage_offset()) + first)
                self._sums.add_rows(write.name, write.first + first, step, seen)


class _Parcels:
    """Bytes of some ranges for each rank, or of each, one rank's after the other's."""

    def __init__(self, runs: Sequence[Runs], ranges: Sequence[Sequence[Range]], rank: int) -> None:
        """``runs`` and ``ranges`` by rank; with ``rank``, this one, nothing travels."""
        self.sizes: list[int] = []
        self.nbytes = 0
        self._by_range: dict[Range, list[tuple[Runs, int]]] = {}
        for number, (all_of_it, asked) in enumerate(zip(runs, ranges, strict=True)):
            begin = self.nbytes
            for low, high in asked if number != rank else ():
                part = all_of_it.within(low, high)
                if part.nbytes:
                    self._by_range.setdefault((low, high), []).append((part, self.nbytes))
                    self.nbytes += part.nbytes
            self.sizes.append(self.nbytes - begin)

    def of(self, each: Range) -> list[tuple[Runs, int]]:
        """What travels of a range, and where it begins among all."""
        return self._by_range.get(each, [])


@dataclass(frozen=True)
class _Messages:
    """A round: what this rank sends, by rank in ``gives`` bytes, and what it gets."""

    bands: dict[Range, Band]
    outgoing: torch.Tensor
    gives: list[int]
    incoming: torch.Tensor
    gets: list[int]
    parcels: _Parcels

    def delivered(self) -> list[Band]:
        """The bands, with what others have sent in its places."""
        for each, band in self.bands.items():
            for runs, place in self.parcels.of(each):
                band.unpack(runs, self.incoming[place : place + runs.nbytes])
        return sorted(self.bands.values(), key=lambda band: band.low)
