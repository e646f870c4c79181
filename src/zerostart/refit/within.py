"""Push weights into engine workers inside the trainer ranks, and stream whole tensors.

The ranks exchange byte ranges of the image in rounds. The image is the safetensors file that a save of the
model would write. In each round every rank requests the ranges that it needs next. The ranks fill them from
their shards and send them to each other. A filled range is a band. A rank has only a few bands in memory at a
time, and no tensor is gathered.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from zerostart.checkpoint.digest import Digests
from zerostart.checkpoint.storage import Reader
from zerostart.checkpoint.write.shards import SaveLayout
from zerostart.distributed.world import World, current_world, default_device
from zerostart.errors import ConfigError, PeerError
from zerostart.recipe import Target, torch_dtype
from zerostart.refit.image import ByteSet, Image, ImagePart, SetDigests, Sums
from zerostart.refit.pushes import CHUNK, ModelWrites, PushTargets, RefitSettings, prepare_model
from zerostart.refit.receiver import FillPlan, Receiver
from zerostart.refit.wire import Driver
from zerostart.transfer.execute import Progress, execute
from zerostart.transfer.planning import Plan
from zerostart.transfer.staging import HostStaging
from zerostart.transfer.tuning import push_threads
from zerostart.transfer.writing import gather_parts, report_rows, write_out

T = TypeVar("T")
#: Maximum size of the ranges that a rank requests in one round, in bytes.
MAX_ROUND_BYTES = 32 << 20
#: First byte of the image and one past the last; both are edges of windows.
Range = tuple[int, int]


class Windows:
    """Byte ranges of an image whose edges no write crosses; see ``plan_writes``."""

    def __init__(self, layout: SaveLayout) -> None:
        edges: list[int] = []
        for entry in sorted(layout.tensors.values(), key=lambda entry: entry.offset):
            if entry.nbytes:
                width = torch_dtype(entry.dtype, entry.name).itemsize
                edges += range(entry.offset, entry.offset + entry.nbytes, CHUNK // width * width)
        self._edges = [*edges, layout.files[0].size]

    def batches(self, items: Iterable[tuple[T, Sequence[Range]]]) -> Iterator[tuple[list[T], list[Range]]]:
        """Yield batches of items with their merged windows, at most ``MAX_ROUND_BYTES`` bytes each.

        Each item comes with the ranges that it needs. An item that needs more is a batch by itself.
        """
        batch: list[T] = []
        windows: set[int] = set()
        for item, needs in items:
            more = windows.union(*(self._numbers(low, high) for low, high in needs))
            if batch and sum(self._edges[n + 1] - self._edges[n] for n in more) > MAX_ROUND_BYTES:
                yield batch, self._merge(windows)
                batch, more = [], more.difference(windows).union(*(self._numbers(*need) for need in needs))
            batch.append(item)
            windows = more
        if batch:
            yield batch, self._merge(windows)

    def between(self, low: int, high: int) -> list[Range]:
        """Return the windows that contain bytes from ``low`` up to ``high``."""
        return [(self._edges[n], self._edges[n + 1]) for n in self._numbers(low, high)]

    def _numbers(self, low: int, high: int) -> range:
        return range(bisect_right(self._edges, low) - 1, bisect_left(self._edges, high))

    def _merge(self, windows: set[int]) -> list[Range]:
        ranges: list[Range] = []
        for number in sorted(windows):
            low, high = self._edges[number], self._edges[number + 1]
            if ranges and ranges[-1][1] == low:
                low = ranges.pop()[0]
            ranges.append((low, high))
        return ranges


class Rounds:
    """Exchange rounds of one push.

    Every rank calls ``fetch`` as often as it needs, and then ``finish``.
    """

    def __init__(
        self,
        ready: ModelWrites,
        owns: Sequence[ByteSet],
        wants: Sequence[ByteSet],
        sums: SetDigests,
        world: World,
        device: torch.device,
    ) -> None:
        """Prepare rounds; ``owns`` and ``wants`` list each rank's available and needed bytes.

        The sets in ``owns`` are disjoint. Bands are allocated on ``device``. Each requested element is added
        to ``sums`` once.
        """
        layout = ready.image.layout
        self.windows = Windows(layout)
        self._layout, self._source, self._storages = layout, ready.plan, ready.storages
        self._sums, self._world, self._device = sums, world, device
        self._sends = [owns[world.rank].intersect(runs) for runs in wants]
        self._receives = [runs.intersect(wants[world.rank]) for runs in owns]
        if device.type != "cpu":
            # Another stream may still write the weights.
            torch.accelerator.synchronize(device)
        offsets = {name: entry.offset for name, entry in layout.tensors.items()}
        self._write_offsets = [offsets[w.name] + w.first * w.dtype.itemsize for w in ready.plan.writes]
        self._is_summed = bytearray(len(ready.plan.writes))

    def fetch(self, ranges: Sequence[Range]) -> list[ImagePart]:
        """Return one band for each of the disjoint ``ranges``, in order; collective.

        A band contains all bytes of its range that this rank needs. If a rank fails, all raise its error.
        """
        if self._world.size == 1:
            return [self._fill_band(*each) for each in ranges]
        return self._exchange(self._world.all_gather_object(list(ranges), "requesting weights"))

    def finish(self) -> None:
        """Answer requests of other ranks until there are none; collective."""
        while self._world.size > 1:
            requests: list[list[Range] | None] = self._world.all_gather_object(None, "requesting weights")
            if all(each is None for each in requests):
                return
            self._exchange(requests)

    def _exchange(self, requests: Sequence[list[Range] | None]) -> list[ImagePart]:
        requested = [each or [] for each in requests]
        rank = self._world.rank
        own_ranges = requested[rank]
        to_send = [_select_ranges(runs, each) for runs, each in zip(self._sends, requested, strict=True)]
        to_receive = [_select_ranges(runs, own_ranges) for runs in self._receives]
        to_send[rank], to_receive[rank] = [], []
        bands: dict[Range, ImagePart] = {}

        def pack() -> tuple[torch.Tensor, torch.Tensor]:
            outgoing, incoming = (
                torch.empty(sum(map(_size_of, parcels)), dtype=torch.uint8, device=self._device)
                for parcels in (to_send, to_receive)
            )
            ends = [sum(map(_size_of, to_send[:number])) for number in range(len(to_send))]
            for each in dict.fromkeys(each for ranges in requested for each in ranges):
                parts = [(n, runs) for n, parcel in enumerate(to_send) for one, runs in parcel if one == each]
                if each not in own_ranges and not parts:
                    continue
                band = self._fill_band(*each)
                for number, runs in parts:
                    for row in runs.rows.tolist():
                        begin, ends[number] = ends[number], ends[number] + row[1] * row[3]
                        outgoing[begin : ends[number]].view(row[3], row[1]).copy_(band.rows(*row))
                if each in own_ranges:
                    bands[each] = band
            return incoming, outgoing

        with self._world.collectives("sending weights", pack) as (incoming, outgoing):
            group = self._world.group if self._device.type == "cpu" else None
            sizes = [_size_of(parcel) for parcel in to_receive], [_size_of(parcel) for parcel in to_send]
            dist.all_to_all_single(incoming, outgoing, *sizes, group=group)
        offset = 0
        for parcel in to_receive:
            for each, runs in parcel:
                for row in runs.rows.tolist():
                    nbytes = row[1] * row[3]
                    bands[each].rows(*row).copy_(incoming[offset : offset + nbytes].view(row[3], row[1]))
                    offset += nbytes
        return [bands[each] for each in own_ranges]

    def _fill_band(self, low: int, high: int) -> ImagePart:
        memory = torch.empty(high - low + low % 64, dtype=torch.uint8, device=self._device)
        band = ImagePart(self._layout, low, memory)
        numbers = range(bisect_left(self._write_offsets, low), bisect_left(self._write_offsets, high))
        for add in (self._sums.add_rows, None):
            selected = [n for n in numbers if bool(self._is_summed[n]) == (add is None)]
            writes = tuple(self._source.writes[n] for n in selected)
            if self._device.type == "cpu":
                write_out(replace(self._source, writes=writes), self._storages, band, push_threads(), add)
            else:
                with torch.no_grad():
                    for write in writes:
                        elements = band.elements(write)
                        gather_parts(write, self._storages, elements)
                        report_rows(write, elements, add)
        for number in numbers:
            self._is_summed[number] = 1
        return band


def _select_ranges(runs: ByteSet, ranges: Sequence[Range]) -> list[tuple[Range, ByteSet]]:
    return [(each, part) for each in ranges if (part := runs.within(*each)).nbytes]


def _size_of(parcel: Sequence[tuple[Range, ByteSet]]) -> int:
    return sum(runs.nbytes for _, runs in parcel)


class _RankSupply:
    """A ``ImageSource`` of bytes from exchange rounds."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    def fill(self, plan: Plan, storages: Sequence[torch.Tensor]) -> None:
        """Copy elements from bands on any device; run computations on the host."""
        windows, copies = self._rounds.windows, HostStaging(0)
        for reads, ranges in windows.batches((read, [(read.offset, read.end)]) for read in plan.reads):
            bands = _Bands(self._rounds.fetch(ranges))
            for read in reads:
                data = bands.rows(read.offset, read.nbytes // read.rows, read.stride, read.rows)
                for part in read.parts:
                    copies.copy_part(part, data.reshape(-1), storages[part.target])
        for computations, ranges in windows.batches(
            (each, [(read.offset, read.end) for read in each.reads]) for each in plan.computations
        ):
            bands = _Bands(self._rounds.fetch(ranges))
            computed = replace(plan, reads=(), computations=computations)
            execute(computed, storages, Progress(0, False), push_threads(), bands)

    def sum(self, image: Image, runs: ByteSet, digests: Digests) -> None:
        spans = zip(runs.low.tolist(), runs.high.tolist(), strict=True)
        windows = dict.fromkeys(window for span in spans for window in self._rounds.windows.between(*span))
        for batch, ranges in self._rounds.windows.batches((window, [window]) for window in windows):
            bands = _Bands(self._rounds.fetch(ranges))
            for window in batch:
                image.sum_rows(runs.within(*window), digests, bands.rows)


class _Bands(Reader):
    """Reader of several bands."""

    def __init__(self, bands: Sequence[ImagePart]) -> None:
        self._bands = bands
        self._lows = [band.low for band in bands]

    def rows(self, start: int, width: int, stride: int, count: int) -> torch.Tensor:
        """Return a view of rows in one band, [count, width]."""
        return self._bands[bisect_right(self._lows, start) - 1].rows(start, width, stride, count)

    def read(self, file: int, offset: int, buffers: Sequence[memoryview]) -> None:
        self._bands[bisect_right(self._lows, offset) - 1].read(file, offset, buffers)


class WithinRanks:
    """Transport to engine workers inside the ranks."""

    #: Empty: no worker connects.
    address = ""

    def __init__(self, target: Receiver | None, driver: Driver | None, strict: bool, world: World) -> None:
        """Store the target of this rank, if any, and the ``driver`` to notify of new versions."""
        self._world, self._receiver, self._driver, self._strict = world, target, driver, strict
        name = None if target is None else target.name or f"rank {world.rank}"
        self._names = world.all_gather_object(name, "naming the workers")
        self._fill: FillPlan | None = None
        self._last_demands: object = None

    @property
    def name(self) -> str:
        """Name of the transport, with the accelerator if bands are on one."""
        kind = self._device.type
        return "local" if kind == "cpu" else f"local ({kind})"

    def agree_on_targets(self, ready: ModelWrites) -> PushTargets:
        """Agree which rank takes which bytes; collective."""
        world = self._world
        own, needed = ByteSet.of_writes(ready.plan, ready.image.layout), ByteSet.of([])
        with world.phase("planning"):
            if self._receiver is not None:
                if self._fill is None or self._fill.image is not ready.image:
                    self._fill = FillPlan(self._receiver, ready.image, self._strict)
                needed = self._fill.wants
        demand = own.rows.tolist(), needed.rows.tolist()
        demands = world.all_gather_object(demand, "planning the messages")
        if self._last_demands != (ready.image.entries, demands):
            self._owns = [ByteSet.of(rows) for rows, _ in demands]
            self._wants = [ByteSet.of(rows) for _, rows in demands]
            self._targets = PushTargets.of(ready.image, self._names, self._wants)
            self._last_demands = ready.image.entries, demands
        self._device = self._choose_device(ready)
        return self._targets

    def move(self, ready: ModelWrites, sums: SetDigests) -> int:
        """Copy all needed bytes into the targets; collective.

        Returns the number of bytes that ranks sent to each other.
        """
        rounds = Rounds(ready, self._owns, self._wants, sums, self._world, self._device)
        if self._fill is not None:
            self._fill.fill(_RankSupply(rounds))
        rounds.finish()
        own_bytes = sum(own.intersect(want).nbytes for own, want in zip(self._owns, self._wants, strict=True))
        return sum(runs.nbytes for runs in self._wants) - own_bytes

    def serve(self, version: int, sums: Sequence[Sums]) -> None:
        """Verify the copied values and notify the engines; collective."""
        world = self._world
        with world.phase("verifying the copied weights"):
            if self._fill is not None:
                self._fill.check(sums[world.rank], version)
        with world.phase("notifying the engines"):
            try:
                if (served := getattr(self._driver, "served", None)) is not None:
                    served(version)
            except Exception as error:  # the engine's call may raise any error
                raise PeerError(
                    f"all workers have version {version}, but the engine's own call on rank {world.rank} "
                    f"failed: {error}"
                ) from error

    def close(self, is_over: bool) -> None:
        """Do nothing: there is no connection."""

    def _choose_device(self, ready: ModelWrites) -> torch.device:
        """Choose one kind of device for the bands of all ranks; collective.

        It is the accelerator if all weights are on it and the process group sends its tensors.
        """
        kinds = {source.storage.device.type for source in ready.storages}
        if self._fill is not None:
            kinds.add(self._fill.device.type)
        if self._world.size > 1:
            carried = str(dist.get_backend_config())
            kinds = {kind if f"{kind}:" in carried else "cpu" for kind in kinds}
        every = set[str]().union(*self._world.all_gather_object(kinds, "choosing a device"))
        device = default_device()
        return device if every == {device.type} else torch.device("cpu")


class WeightSource:
    """Stream of whole tensors; see ``zerostart.weight_source``."""

    def __init__(self, model: nn.Module, rank: int | None, settings: RefitSettings) -> None:
        self._world = world = current_world()
        if rank is not None and not 0 <= rank < world.size:
            raise ConfigError(f"rank={rank} is not one of the {world.size} ranks")
        self.model, self.settings = model, settings
        self._targets = range(world.size) if rank is None else (rank,)
        self._image = prepare_model(model, settings, world).image

    def metadata(self) -> list[Target]:
        """List the name, dtype and whole shape of each tensor in order; not collective."""
        return [
            Target(name, tuple(shape), torch_dtype(dtype, name)) for name, dtype, shape in self._image.entries
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the current weights; collective, to the end."""
        world, image = self._world, self._image
        with world.phase("giving whole tensors of the checkpoint"):
            ready = prepare_model(self.model, self.settings, world)
            if ready.image.entries != image.entries:
                raise ConfigError(
                    "the model's tensors have changed since weight_source was called; call it again"
                )
            own = ByteSet.of_writes(ready.plan, image.layout).rows.tolist()
            owns = [ByteSet.of(rows) for rows in world.all_gather_object(own, "planning the messages")]
            wants = [ByteSet.of([(0, image.nbytes, 0, n in self._targets)]) for n in range(world.size)]
            sums, device = SetDigests(image, []), torch.device("cpu")
            rounds = Rounds(ready, owns, wants, sums, world, device)
            is_target = world.rank in self._targets
            for meta in self.metadata():
                entry = image.layout.tensors[meta.name]
                out = torch.empty(meta.shape, dtype=meta.dtype, device=device if is_target else "meta")
                windows = rounds.windows.between(entry.offset, entry.offset + entry.nbytes)
                # The windows of a batch are neighbours, so they are merged into one range.
                for _, [(low, high)] in rounds.windows.batches((None, [window]) for window in windows):
                    for band in rounds.fetch([(low, high)] if is_target else []):
                        flat = out.view(-1).view(torch.uint8)[low - entry.offset : high - entry.offset]
                        flat.copy_(band.rows(low, high - low, 0, 1)[0])
                yield meta.name, out
