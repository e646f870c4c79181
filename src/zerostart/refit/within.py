"""Push weights into a model or engine workers inside the trainer ranks.

The ranks exchange byte ranges of the image in rounds. The image is the safetensors file that a save of the
model would write. In each round every rank requests the ranges that it needs next. The ranks fill them from
their shards and send them to each other. A filled range is a band. A rank has only a few bands in memory at a
time, and no tensor is gathered.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from zerostart.checkpoint.digest import Digests
from zerostart.checkpoint.storage import Reader
from zerostart.checkpoint.write.shards import SaveLayout
from zerostart.distributed.world import World, default_device
from zerostart.engines import Master, Shard, whole_shard
from zerostart.errors import ConfigError, PeerError, VerifyError
from zerostart.live.model import LiveModel
from zerostart.recipe import Recipe, torch_dtype
from zerostart.refit.drivers import Driver
from zerostart.refit.image import Entry, Image, ImagePart, SetSums, Sums, differing
from zerostart.refit.pushes import CHUNK, PAGE, ModelWrites, Takers
from zerostart.refit.receiver import FillPlan, FromReader, Receiver
from zerostart.refit.runs import Runs
from zerostart.state.editing import differing_bits, master_of
from zerostart.state.saving.adapters import has_adapters
from zerostart.state.saving.contents import contents_of
from zerostart.transfer.execute import Progress, execute
from zerostart.transfer.planning import Plan
from zerostart.transfer.planning.writes import Origin, Write, plan_writes
from zerostart.transfer.staging import HostStaging, copy_strided
from zerostart.transfer.tuning import push_threads
from zerostart.transfer.writing import Source, write_out

T = TypeVar("T")
#: Maximum size of the ranges that a rank requests in one round, in bytes.
BAND = 32 << 20
#: First byte of the image and one past the last; both are edges of windows.
Range = tuple[int, int]


class Windows:
    """Windows of an image: byte ranges whose edges no write crosses; see ``plan_writes``."""

    def __init__(self, layout: SaveLayout) -> None:
        edges: list[int] = []
        for entry in sorted(layout.tensors.values(), key=lambda entry: entry.offset):
            if entry.nbytes:
                width = torch_dtype(entry.dtype, entry.name).itemsize
                edges += range(entry.offset, entry.offset + entry.nbytes, CHUNK // width * width)
        self._edges = [*edges, layout.files[0].size]

    def batches(self, items: Iterable[tuple[T, Sequence[Range]]]) -> Iterator[tuple[list[T], list[Range]]]:
        """Yield batches of items with their merged windows, at most ``BAND`` bytes each.

        Each item comes with the ranges that it needs. An item that needs more is a batch by itself.
        """
        batch: list[T] = []
        windows: set[int] = set()
        for item, needs in items:
            more = windows.union(*(self._numbers(low, high) for low, high in needs))
            if batch and sum(self._edges[n + 1] - self._edges[n] for n in more) > BAND:
                yield batch, self._merge(windows)
                batch, more = [], more.difference(windows).union(*(self._numbers(*need) for need in needs))
            batch.append(item)
            windows = more
        if batch:
            yield batch, self._merge(windows)

    def all(self) -> Iterator[list[Range]]:
        """Yield all windows in batches of at most ``BAND`` bytes, equal on every rank."""
        yield from (ranges for _, ranges in self.batches((None, [each]) for each in pairwise(self._edges)))

    def between(self, low: int, high: int) -> list[Range]:
        """Return the windows that contain bytes from ``low`` up to ``high``."""
        return [(self._edges[n], self._edges[n + 1]) for n in self._numbers(low, high)]

    def _numbers(self, low: int, high: int) -> range:
        return range(bisect_right(self._edges, low) - 1, bisect_left(self._edges, high))

    def _merge(self, windows: set[int]) -> list[Range]:
        found: list[Range] = []
        for number in sorted(windows):
            low, high = self._edges[number], self._edges[number + 1]
            if found and found[-1][1] == low:
                low = found.pop()[0]
            found.append((low, high))
        return found


class Rounds:
    """Exchange rounds of one push.

    Every rank calls ``bring`` as often as it needs, and then ``finish``.
    """

    def __init__(
        self,
        ready: ModelWrites,
        owns: Sequence[Runs],
        wants: Sequence[Runs],
        sums: SetSums,
        world: World,
        device: torch.device,
    ) -> None:
        """Prepare rounds; ``owns`` and ``wants`` list each rank's available and needed bytes.

        The bytes of ``owns`` are disjoint. Bands are allocated on ``device`` and sent from there. Each
        element that any rank requests is added to ``sums`` once.
        """
        layout = ready.image.layout
        self.windows = Windows(layout)
        self._layout, self._source, self._storages = layout, ready.plan, ready.storages
        self._sums, self._world, self._device = sums, world, device
        self._sends = [owns[world.rank].intersect(runs) for runs in wants]
        self._receives = [runs.intersect(wants[world.rank]) for runs in owns]
        if device.type != "cpu":
            # The weights may still be written on another stream than the current one.
            torch.accelerator.synchronize(device)
        self._write_offsets = [_write_offset(layout, write) for write in ready.plan.writes]
        self._is_summed = bytearray(len(ready.plan.writes))

    def bring(self, ranges: Sequence[Range]) -> list[ImagePart]:
        """Return one band for each of the disjoint ``ranges``, in order; collective.

        A band contains all bytes of its range that this rank needs. If a rank fails, all raise its error.
        """
        if self._world.size == 1:
            return [self._fill_band(*each) for each in ranges]
        return self._exchange(self._world.all_gather_object(list(ranges), "requesting weights"))

    def finish(self) -> None:
        """Answer the requests of other ranks until no rank has any; collective."""
        while self._world.size > 1:
            requests: list[list[Range] | None] = self._world.all_gather_object(None, "requesting weights")
            if all(asked is None for asked in requests):
                return
            self._exchange([asked or [] for asked in requests])

    def _exchange(self, requests: Sequence[list[Range] | None]) -> list[ImagePart]:
        asked = [each or [] for each in requests]
        rank = self._world.rank
        own_ranges = asked[rank]
        to_send = [_select_ranges(runs, each) for runs, each in zip(self._sends, asked, strict=True)]
        to_receive = [_select_ranges(runs, own_ranges) for runs in self._receives]
        to_send[rank], to_receive[rank] = [], []
        bands: dict[Range, ImagePart] = {}

        def pack() -> tuple[torch.Tensor, torch.Tensor]:
            outgoing, incoming = (
                torch.empty(sum(map(_size_of, parcels)), dtype=torch.uint8, device=self._device)
                for parcels in (to_send, to_receive)
            )
            ends = [sum(map(_size_of, to_send[:number])) for number in range(len(to_send))]
            for each in dict.fromkeys(each for ranges in asked for each in ranges):
                sent = [(n, runs) for n, parcel in enumerate(to_send) for one, runs in parcel if one == each]
                if each not in own_ranges and not sent:
                    continue
                band = self._fill_band(*each)
                for number, runs in sent:
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
        done = 0
        for parcel in to_receive:
            for each, runs in parcel:
                for row in runs.rows.tolist():
                    nbytes = row[1] * row[3]
                    bands[each].rows(*row).copy_(incoming[done : done + nbytes].view(row[3], row[1]))
                    done += nbytes
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
                for write in writes:
                    self._copy_on_device(write, band.elements(write), add is not None)
        for number in numbers:
            self._is_summed[number] = 1
        return band

    def _copy_on_device(self, write: Write, window: torch.Tensor, is_summed: bool) -> None:
        with torch.no_grad():
            for part in write.parts:
                # A write has the loops of a read, with source and target exchanged.
                loops = [(size, local, far) for size, far, local in part.loops]
                count = 1 + sum((size - 1) * local for size, local, _ in loops)
                shard_values = self._storages[part.target].elements(part.to, count)
                copy_strided(window, part.at // part.dtype.itemsize, shard_values, loops)
        for first, count, step, rows in write.rows() if is_summed else ():
            values = window.as_strided((rows, count), (step, 1), int(window.storage_offset()) + first)
            self._sums.add_rows(write.name, write.first + first, step, values)


def _write_offset(layout: SaveLayout, write: Write) -> int:
    return layout.tensors[write.name].offset + write.first * write.dtype.itemsize


def _select_ranges(runs: Runs, ranges: Sequence[Range]) -> list[tuple[Range, Runs]]:
    return [(each, part) for each in ranges if (part := runs.within(*each)).nbytes]


def _size_of(parcel: Sequence[tuple[Range, Runs]]) -> int:
    return sum(runs.nbytes for _, runs in parcel)


class ModelTarget:
    """This rank's part of another sharded model."""

    #: None: reports of a push list workers of engines only.
    name = None

    def __init__(self, model: nn.Module, world: World) -> None:
        """Check the model; ``world`` contains the ranks that have a part of it."""
        if has_adapters(LiveModel(model, world).module):
            raise ConfigError(
                "target has PEFT adapters, which a push does not update: merge them "
                "(merge_and_unload), or pass the model without them"
            )
        self._model, self._world = model, world

    def look(self) -> Mapping[str, Entry]:
        """Read the model's current tensors; collective among the ranks that have it."""
        live = LiveModel(self._model, self._world)
        # Before the rest: a parameter that is still gathered would be used instead of its shard.
        live.drop_gathered()
        tensors, _ = live.tensors()
        named = dict(live.module.named_parameters(remove_duplicate=False))
        buffers = dict(live.module.named_buffers(remove_duplicate=False))
        items = {item.name: item for item in tensors}
        contents = contents_of(live, tensors, None)
        #: Recipe, shard and parameter (None for a buffer) of each tensor.
        self._tensors: list[tuple[Recipe, Shard, nn.Parameter | None]] = []
        for one in contents.outgoing:
            item = items[one.recipe.target.name]
            if item.is_parameter:
                self._tensors.append((one.recipe, item.shard, named[item.current_name]))
            else:
                # Each rank has its own copy of a buffer and fills it; a save writes the copy of rank 0 only.
                buffer = whole_shard(item.name, buffers[item.current_name], live.world)
                self._tensors.append((one.recipe, buffer, None))
        return {entry[0]: entry for entry in contents.entries}

    @property
    def device(self) -> torch.device:
        """Device of the shards."""
        return next((shard.storage.device for _, shard, _ in self._tensors), torch.device("cpu"))

    def plan(self, image: Image) -> tuple[Runs, list[Runs]]:
        """Plan which bytes of the image this rank copies into its shards.

        The plan lists writes into the image. ``take`` executes them in the opposite direction.
        """
        wanted = [
            (
                recipe,
                shard.layout,
                Origin(shard.name, shard.storage.dtype, shard.storage.device.type == "cpu"),
            )
            for recipe, shard, _ in self._tensors
        ]
        self._image, self._plan = image, plan_writes(image.layout, wanted, CHUNK, PAGE)
        runs = Runs.of_writes(self._plan, image.layout)
        return runs, [runs] if runs.nbytes else []

    def take(self, rounds: Rounds) -> None:
        """Copy the planned bytes into the shards, in the order of the image."""
        places = [_write_offset(self._image.layout, write) for write in self._plan.writes]
        for ranges in rounds.windows.all():
            for (low, high), band in zip(ranges, rounds.bring(ranges), strict=True):
                self._fill(band, self._plan.writes[bisect_left(places, low) : bisect_left(places, high)])

    def check(self, sums: Sequence[Sums], version: int) -> None:
        """Read the shards back; raise VerifyError if they differ from the sent values."""
        entries = self._image.by_name
        storages = [Source(shard.storage.detach()) for _, shard, _ in self._tensors]
        for expected in sums:
            digests = Digests(entries[name] for name in expected)
            write_out(self._plan, storages, None, push_threads(), digests.add_rows)
            if wrong := differing(expected, digests.sums()):
                raise VerifyError(
                    f"{len(wrong)} tensors of the target differ from the sent values "
                    f"({', '.join(wrong[:3])}): do not use the target; push again"
                )

    def serve(self, version: int) -> None:
        """Do nothing."""

    def _fill(self, band: ImagePart, writes: Sequence[Write]) -> None:
        """Copy elements of the band into shards and their fp32 masters."""
        with contextlib.ExitStack() as stack, torch.no_grad():
            masters: dict[int, Master | None] = {}
            for write in writes:
                window, width = band.elements(write), write.dtype.itemsize
                for part in write.parts:
                    _, shard, parameter = self._tensors[part.target]
                    if part.target not in masters:
                        masters[part.target] = (
                            None if parameter is None else stack.enter_context(master_of(parameter))
                        )
                    master = masters[part.target]
                    count = 1 + sum((size - 1) * local for size, _, local in part.loops)
                    shard_values = shard.storage.detach()[part.to : part.to + count]
                    before = shard_values if master is None else shard_values.clone()
                    copy_strided(shard_values, 0, window[part.at // width :], part.loops)
                    if master is not None:
                        _update_master(master, part.to, before, shard_values)


def _update_master(master: Master, place: int, before: torch.Tensor, now: torch.Tensor) -> None:
    """Copy changed elements of a shard, from index ``place`` on, into its fp32 master.

    Elements that did not change keep the higher precision of the master.
    """
    first, values = master
    low, high = max(place, first), min(place + now.numel(), first + values.numel())
    if low < high:
        inside = slice(low - place, high - place)
        is_changed = differing_bits(before[inside], now[inside]).to(values.device)
        target = values[low - first : high - first]
        target.copy_(torch.where(is_changed, now[inside].to(values.device, values.dtype), target))


class EngineTarget:
    """A worker of an engine that runs inside this rank."""

    def __init__(self, receiver: Receiver, driver: Driver | None, strict: bool, rank: int) -> None:
        """Wrap a receiver; ``driver``, if any, is called when a version is complete."""
        self.receiver, self.name = receiver, receiver.name or f"rank {rank}"
        self._driver, self._strict = driver, strict
        self._plan: FillPlan | None = None
        self._image: Image | None = None

    def look(self) -> Mapping[str, Entry]:
        """Return no entries: the loader of an engine accepts any tensor."""
        return {}

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return torch.device("cpu") if self._plan is None else self._plan.device

    def plan(self, image: Image) -> tuple[Runs, list[Runs]]:
        """Find the bytes that the engine takes; raise ConversionError if that fails."""
        if self._plan is None or self._image is not image:
            self._plan, self._image = FillPlan(self.receiver, image, self._strict), image
        return self._plan.wants, self._plan.sets

    def take(self, rounds: Rounds) -> None:
        """Fill the tensors of the engine, in the stages of its loader."""
        assert self._plan is not None, "planned before"
        self._plan.fill(_RankSupply(rounds))

    def check(self, sums: Sequence[Sums], version: int) -> None:
        """Raise VerifyError if the tensors differ from the sent values."""
        assert self._plan is not None, "planned before"
        self._plan.check(sums, version)

    def serve(self, version: int) -> None:
        """Tell the engine that it has the version; raise the error of its call."""
        if (served := getattr(self._driver, "served", None)) is not None:
            served(version)


class _RankSupply:
    """A ``Supply`` that gets its bytes from the exchange rounds."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    def fill(self, plan: Plan, storages: Sequence[torch.Tensor]) -> None:
        """Copy elements from bands on any device; run computations on the host."""
        windows, copies = self._rounds.windows, HostStaging(0)
        for reads, ranges in windows.batches((read, [(read.offset, read.end)]) for read in plan.reads):
            bands = _Bands(self._rounds.bring(ranges))
            for read in reads:
                data = bands.at(read.offset).rows(
                    read.offset, read.nbytes // read.rows, read.stride, read.rows
                )
                for part in read.parts:
                    copies.put(part, data.reshape(-1), storages[part.target])
        for computations, ranges in windows.batches(
            (each, [(read.offset, read.end) for read in each.reads]) for each in plan.computations
        ):
            bands = _Bands(self._rounds.bring(ranges))
            computed = replace(plan, reads=(), computations=computations)
            execute(computed, storages, Progress(0, False), push_threads(), bands)

    def sum(self, image: Image, runs: Runs, digests: Digests) -> None:
        parts = (
            (part, list(zip(part.low.tolist(), part.high.tolist(), strict=True)))
            for part in runs.batches(CHUNK)
        )
        for batch, ranges in self._rounds.windows.batches(parts):
            reader = FromReader(_Bands(self._rounds.bring(ranges)))
            for part in batch:
                reader.sum(image, part, digests)


class _Bands(Reader):
    """A reader of the bytes of several bands."""

    def __init__(self, bands: Sequence[ImagePart]) -> None:
        self._bands = bands
        self._lows = [band.low for band in bands]

    def at(self, offset: int) -> ImagePart:
        """Return the band that contains byte ``offset``."""
        return self._bands[bisect_right(self._lows, offset) - 1]

    def read(self, file: int, offset: int, buffers: Sequence[memoryview]) -> None:
        self.at(offset).read(file, offset, buffers)


class WithinRanks:
    """Transport to targets inside the ranks, which may each have a part."""

    #: Empty, since no worker connects.
    address = ""

    def __init__(
        self, target: nn.Module | Receiver | None, driver: Driver | None, strict: bool, world: World
    ) -> None:
        """Inspect the target; collective. ``target`` is None on ranks without a part of it."""
        self._world = world
        have = world.all_gather_object(target is not None, "locating the target")
        # Ranks of the target, numbered as its engine numbers them. If only some trainer ranks are among them,
        # there is no process group for these: the target must not need a collective.
        members = world if all(have) else World(sum(have[: world.rank]), sum(have), None)
        self._target: ModelTarget | EngineTarget | None = None
        with world.phase("starting a refit"):
            if isinstance(target, nn.Module):
                self._target = ModelTarget(target, members)
            elif target is not None:
                self._target = EngineTarget(target, driver, strict, world.rank)
        name = None if self._target is None else self._target.name
        self._names = world.all_gather_object(name, "naming the workers")
        self._takers: Takers | None = None
        self._last_demands: object = None

    @property
    def name(self) -> str:
        """Name of the transport, with the accelerator if bands are on one."""
        kind = self._device.type
        return "local" if kind == "cpu" else f"local ({kind})"

    def look(self) -> Mapping[str, Entry]:
        """Return the tensors of a model target, empty for an engine; collective."""
        target, world = self._target, self._world
        with world.phase("inspecting the target"):
            found = {} if target is None else dict(target.look())
        # Ranks without a part of the target need the same entries.
        listed = world.all_gather_object(list(found.values()), "inspecting the target")
        return {entry[0]: entry for entry in next((each for each in listed if each), [])}

    def meet(self, ready: ModelWrites) -> Takers:
        """Agree which rank takes which bytes; collective."""
        world = self._world
        own = Runs.of_writes(ready.plan, ready.image.layout)
        with world.phase("planning"):
            wants, sets = (None, []) if self._target is None else self._target.plan(ready.image)
            taken = None if wants is None else wants.to_bytes()
        demands = world.all_gather_object(
            (own.to_bytes(), taken, [each.to_bytes() for each in sets]), "planning the messages"
        )
        if self._takers is None or self._last_demands != (ready.image.entries, demands):
            self._last_demands = ready.image.entries, demands
            self._owns = [Runs.from_bytes(data) for data, *_ in demands]
            self._wants = [Runs.from_bytes(data or b"") for _, data, _ in demands]
            self._takers = Takers.of(ready.image, self._names, self._wants, [sums for *_, sums in demands])
        self._device = self._choose_device(ready)
        return self._takers

    def move(self, ready: ModelWrites, sums: SetSums) -> int:
        """Copy all needed bytes into the targets; collective.

        Returns the number of bytes that ranks sent to each other.
        """
        rounds = Rounds(ready, self._owns, self._wants, sums, self._world, self._device)
        if self._target is not None:
            self._target.take(rounds)
        rounds.finish()
        own_bytes = sum(own.intersect(want).nbytes for own, want in zip(self._owns, self._wants, strict=True))
        return sum(runs.nbytes for runs in self._wants) - own_bytes

    def serve(self, version: int, sums: Sequence[Sequence[Sums]]) -> None:
        """Verify the copied values and notify the engines; collective."""
        world, failed = self._world, ""
        with world.phase("verifying the copied weights"):
            if self._target is not None:
                self._target.check(sums[world.rank], version)
        try:
            if self._target is not None:
                self._target.serve(version)
        except Exception as error:  # the engine's call may raise any error
            failed = (
                f"all workers have version {version}, but the engine's own call on rank {world.rank} "
                f"failed: {error}"
            )
        if failures := [text for text in world.all_gather_object(failed, "notifying the engines") if text]:
            raise PeerError("; ".join(failures))

    def close(self, is_over: bool) -> None:
        """Do nothing: there is no connection to close."""

    def _choose_device(self, ready: ModelWrites) -> torch.device:
        """Choose the device of the bands, of the same kind on every rank; collective.

        It is the accelerator if all weights are on it and the process group sends its tensors.
        """
        kinds = {source.storage.device.type for source in ready.storages}
        if self._target is not None:
            kinds.add(self._target.device.type)
        if self._world.size > 1:
            carried = str(dist.get_backend_config())
            kinds = {kind if f"{kind}:" in carried else "cpu" for kind in kinds}
        every = set[str]().union(*self._world.all_gather_object(kinds, "choosing a device"))
        device = default_device()
        return device if every == {device.type} else torch.device("cpu")
