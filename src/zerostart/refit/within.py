"""Weights into targets that live in the trainer's own ranks: another sharded model, or workers of an engine.

The ranks exchange them round by round. In each round every rank says which ranges of the image it wants
next, puts in what its shards have of them, and the ranks send each other the rest. So no rank has more than
some bands of the image, and nothing is gathered.
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
#: Bytes of the image that a rank asks for at a time.
BAND = 32 << 20
#: Bytes of the image, the first and one past the last; both are edges of windows.
Range = tuple[int, int]


class Windows:
    """The windows of an image, whose edges no write crosses; see ``plan_writes``."""

    def __init__(self, layout: SaveLayout) -> None:
        edges: list[int] = []
        for entry in sorted(layout.tensors.values(), key=lambda entry: entry.offset):
            if entry.nbytes:
                width = torch_dtype(entry.dtype, entry.name).itemsize
                edges += range(entry.offset, entry.offset + entry.nbytes, CHUNK // width * width)
        self._edges = [*edges, layout.files[0].size]

    def batches(self, items: Iterable[tuple[T, Sequence[Range]]]) -> Iterator[tuple[list[T], list[Range]]]:
        """Yield items that each need some bytes, as many at a time as ``BAND`` allows, and their windows."""
        batch: list[T] = []
        windows: set[int] = set()
        for item, needs in items:
            more = windows.union(*(self._touched(low, high) for low, high in needs))
            if batch and sum(self._edges[n + 1] - self._edges[n] for n in more) > BAND:
                yield batch, self._joined(windows)
                batch, more = [], more.difference(windows).union(*(self._touched(*need) for need in needs))
            batch.append(item)
            windows = more
        if batch:
            yield batch, self._joined(windows)

    def all(self) -> Iterator[list[Range]]:
        """Yield the whole image, in parts of ``BAND`` bytes: the same on every rank."""
        yield from (ranges for _, ranges in self.batches((None, [each]) for each in pairwise(self._edges)))

    def between(self, low: int, high: int) -> list[Range]:
        """Return the windows of the bytes from ``low`` up to ``high``."""
        return [(self._edges[n], self._edges[n + 1]) for n in self._touched(low, high)]

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


class Rounds:
    """The rounds of one push. Every rank calls ``bring`` as often as it needs, and then ``finish``."""

    def __init__(
        self,
        ready: ModelWrites,
        owns: Sequence[Runs],
        wants: Sequence[Runs],
        sums: SetSums,
        world: World,
        device: torch.device,
    ) -> None:
        """``owns`` are the bytes that each rank has, disjoint, ``wants`` those that it takes.

        Bands are on ``device``, and travel from there. Each element that anybody asks for is added to
        ``sums``, once.
        """
        layout = ready.image.layout
        self.windows = Windows(layout)
        self._layout, self._source, self._storages = layout, ready.plan, ready.storages
        self._sums, self._world, self._device = sums, world, device
        self._sends = [owns[world.rank].intersect(runs) for runs in wants]
        self._receives = [runs.intersect(wants[world.rank]) for runs in owns]
        if device.type != "cpu":
            # What was computed last may still be under way, on another stream than the current one.
            torch.accelerator.synchronize(device)
        self._places = [_place(layout, write) for write in ready.plan.writes]
        self._summed = bytearray(len(ready.plan.writes))

    def bring(self, asked: Sequence[Range]) -> list[ImagePart]:
        """Return bands of the disjoint ranges ``asked`` for, in order; collective.

        A band has all that this rank wants of its range. Raises what another rank fails with.
        """
        if self._world.size == 1:
            return [self._put_in(*each) for each in asked]
        return self._exchange(self._world.all_gather_object(list(asked), "asking for weights"))

    def finish(self) -> None:
        """Give the others what they ask for, until nobody asks any more; collective."""
        while self._world.size > 1:
            everybody: list[list[Range] | None] = self._world.all_gather_object(None, "asking for weights")
            if all(asked is None for asked in everybody):
                return
            self._exchange([asked or [] for asked in everybody])

    def _exchange(self, everybody: Sequence[list[Range] | None]) -> list[ImagePart]:
        asked = [each or [] for each in everybody]
        rank = self._world.rank
        mine = asked[rank]
        gives = [_within(runs, each) for runs, each in zip(self._sends, asked, strict=True)]
        gets = [_within(runs, mine) for runs in self._receives]
        gives[rank], gets[rank] = [], []
        bands: dict[Range, ImagePart] = {}

        def pack() -> tuple[torch.Tensor, torch.Tensor]:
            outgoing, incoming = (
                torch.empty(sum(map(_nbytes, parcels)), dtype=torch.uint8, device=self._device)
                for parcels in (gives, gets)
            )
            ends = [sum(map(_nbytes, gives[:number])) for number in range(len(gives))]
            for each in dict.fromkeys(each for ranges in asked for each in ranges):
                sent = [(n, runs) for n, parcel in enumerate(gives) for one, runs in parcel if one == each]
                if each not in mine and not sent:
                    continue
                band = self._put_in(*each)
                for number, runs in sent:
                    for row in runs.rows.tolist():
                        begin, ends[number] = ends[number], ends[number] + row[1] * row[3]
                        outgoing[begin : ends[number]].view(row[3], row[1]).copy_(band.rows(*row))
                if each in mine:
                    bands[each] = band
            return incoming, outgoing

        with self._world.collectives("sending weights", pack) as (incoming, outgoing):
            group = self._world.group if self._device.type == "cpu" else None
            sizes = [_nbytes(parcel) for parcel in gets], [_nbytes(parcel) for parcel in gives]
            dist.all_to_all_single(incoming, outgoing, *sizes, group=group)
        done = 0
        for parcel in gets:
            for each, runs in parcel:
                for row in runs.rows.tolist():
                    nbytes = row[1] * row[3]
                    bands[each].rows(*row).copy_(incoming[done : done + nbytes].view(row[3], row[1]))
                    done += nbytes
        return [bands[each] for each in mine]

    def _put_in(self, low: int, high: int) -> ImagePart:
        room = torch.empty(high - low + low % 64, dtype=torch.uint8, device=self._device)
        band = ImagePart(self._layout, low, room)
        numbers = range(bisect_left(self._places, low), bisect_left(self._places, high))
        for noted in (self._sums.add_rows, None):
            chosen = [n for n in numbers if bool(self._summed[n]) == (noted is None)]
            writes = tuple(self._source.writes[n] for n in chosen)
            if self._device.type == "cpu":
                write_out(replace(self._source, writes=writes), self._storages, band, push_threads(), noted)
            else:
                for write in writes:
                    self._put_there(write, band.elements(write), noted is not None)
        for number in numbers:
            self._summed[number] = 1
        return band

    def _put_there(self, write: Write, window: torch.Tensor, is_summed: bool) -> None:
        with torch.no_grad():
            for part in write.parts:
                # A write is a read run backwards.
                loops = [(size, local, far) for size, far, local in part.loops]
                count = 1 + sum((size - 1) * local for size, local, _ in loops)
                held = self._storages[part.target].elements(part.to, count)
                copy_strided(window, part.at // part.dtype.itemsize, held, loops)
        for first, count, step, rows in write.rows() if is_summed else ():
            seen = window.as_strided((rows, count), (step, 1), int(window.storage_offset()) + first)
            self._sums.add_rows(write.name, write.first + first, step, seen)


def _place(layout: SaveLayout, write: Write) -> int:
    return layout.tensors[write.name].offset + write.first * write.dtype.itemsize


def _within(runs: Runs, ranges: Sequence[Range]) -> list[tuple[Range, Runs]]:
    return [(each, part) for each in ranges if (part := runs.within(*each)).nbytes]


def _nbytes(parcel: Sequence[tuple[Range, Runs]]) -> int:
    return sum(runs.nbytes for _, runs in parcel)


class ModelTarget:
    """This rank's part of another sharded model."""

    #: A model counts no versions, and has no worker.
    name = None

    def __init__(self, model: nn.Module, world: World) -> None:
        """``world`` has the ranks that the model is on."""
        if has_adapters(LiveModel(model, world).module):
            raise ConfigError(
                "target has adapters of PEFT, which are no weights of the model: merge them "
                "(merge_and_unload), or pass the model without them"
            )
        self._model, self._world = model, world

    def look(self) -> Mapping[str, Entry]:
        """Find the model's tensors as they are now; collective among the ranks that have it."""
        live = LiveModel(self._model, self._world)
        # First: a parameter that is still gathered would be used in the place of its shard.
        live.drop_gathered()
        tensors, _ = live.tensors()
        named = dict(live.module.named_parameters(remove_duplicate=False))
        buffers = dict(live.module.named_buffers(remove_duplicate=False))
        items = {item.name: item for item in tensors}
        contents = contents_of(live, tensors, None)
        #: Recipe, shard, and parameter (None for a buffer) of each tensor.
        self._taken: list[tuple[Recipe, Shard, nn.Parameter | None]] = []
        for one in contents.outgoing:
            item = items[one.recipe.target.name]
            if item.is_parameter:
                self._taken.append((one.recipe, item.shard, named[item.current_name]))
            else:
                # Every rank has a buffer of its own, of which a save takes the first one's only.
                buffer = whole_shard(item.name, buffers[item.current_name], live.world)
                self._taken.append((one.recipe, buffer, None))
        return {entry[0]: entry for entry in contents.entries}

    @property
    def device(self) -> torch.device:
        """Device of the shards."""
        return next((shard.storage.device for _, shard, _ in self._taken), torch.device("cpu"))

    def plan(self, image: Image) -> tuple[Runs, list[Runs]]:
        """Plan the windows of the image that this rank takes from, to be run backwards."""
        wanted = [
            (
                recipe,
                shard.layout,
                Origin(shard.name, shard.storage.dtype, shard.storage.device.type == "cpu"),
            )
            for recipe, shard, _ in self._taken
        ]
        self._image, self._plan = image, plan_writes(image.layout, wanted, CHUNK, PAGE)
        runs = Runs.of_writes(self._plan, image.layout)
        return runs, [runs] if runs.nbytes else []

    def take(self, rounds: Rounds) -> None:
        """Take all of it, in the image's order."""
        places = [_place(self._image.layout, write) for write in self._plan.writes]
        for ranges in rounds.windows.all():
            for (low, high), band in zip(ranges, rounds.bring(ranges), strict=True):
                self._fill(band, self._plan.writes[bisect_left(places, low) : bisect_left(places, high)])

    def check(self, sums: Sequence[Sums], version: int) -> None:
        """Read the shards, and raise VerifyError if they are not what was sent."""
        entries = self._image.by_name
        storages = [Source(shard.storage.detach()) for _, shard, _ in self._taken]
        for expected in sums:
            digests = Digests(entries[name] for name in expected)
            write_out(self._plan, storages, None, push_threads(), digests.add_rows)
            if wrong := differing(expected, digests.sums()):
                raise VerifyError(
                    f"{len(wrong)} tensors of the target are not what was sent ({', '.join(wrong[:3])}): the "
                    "target is not to be used; push again"
                )

    def serve(self, version: int) -> None:
        """Do nothing."""

    def _fill(self, band: ImagePart, writes: Sequence[Write]) -> None:
        """Run writes backwards: elements of the band into shards, and into their fp32 masters."""
        with contextlib.ExitStack() as stack, torch.no_grad():
            masters: dict[int, Master | None] = {}
            for write in writes:
                window, width = band.elements(write), write.dtype.itemsize
                for part in write.parts:
                    _, shard, parameter = self._taken[part.target]
                    if part.target not in masters:
                        masters[part.target] = (
                            None if parameter is None else stack.enter_context(master_of(parameter))
                        )
                    master = masters[part.target]
                    count = 1 + sum((size - 1) * local for size, _, local in part.loops)
                    held = shard.storage.detach()[part.to : part.to + count]
                    before = held if master is None else held.clone()
                    copy_strided(held, 0, window[part.at // width :], part.loops)
                    if master is not None:
                        _update_master(master, part.to, before, held)


def _update_master(master: Master, place: int, before: torch.Tensor, now: torch.Tensor) -> None:
    """Copy the elements that have changed, from ``place`` of a shard on, into its master.

    The master has more bits: it stays as it was where they stay as they were.
    """
    first, values = master
    low, high = max(place, first), min(place + now.numel(), first + values.numel())
    if low < high:
        inside = slice(low - place, high - place)
        chosen = differing_bits(before[inside], now[inside]).to(values.device)
        kept = values[low - first : high - first]
        kept.copy_(torch.where(chosen, now[inside].to(values.device, values.dtype), kept))


class EngineTarget:
    """An engine's worker that lives in this rank."""

    def __init__(self, receiver: Receiver, driver: Driver | None, strict: bool, rank: int) -> None:
        """``driver`` is told of versions; None: nobody is."""
        self.receiver, self.name = receiver, receiver.name or f"rank {rank}"
        self._driver, self._strict = driver, strict
        self._plan: FillPlan | None = None
        self._image: Image | None = None

    def look(self) -> Mapping[str, Entry]:
        """Return nothing: a loader takes what comes."""
        return {}

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return torch.device("cpu") if self._plan is None else self._plan.device

    def plan(self, image: Image) -> tuple[Runs, list[Runs]]:
        """Find out what the engine takes; raise ConversionError if that is not possible."""
        if self._plan is None or self._image is not image:
            self._plan, self._image = FillPlan(self.receiver, image, self._strict), image
        return self._plan.wants, self._plan.sets

    def take(self, rounds: Rounds) -> None:
        """Take all of it, stage by stage of the engine's own."""
        assert self._plan is not None, "planned before"
        self._plan.fill(_FromRanks(rounds))

    def check(self, sums: Sequence[Sums], version: int) -> None:
        """Raise VerifyError if the tensors are not what was sent."""
        assert self._plan is not None, "planned before"
        self._plan.check(sums, version)

    def serve(self, version: int) -> None:
        """Tell the engine that it has the version; raise what its call raises."""
        if (served := getattr(self._driver, "served", None)) is not None:
            served(version)


class _FromRanks:
    """Bytes of the rounds in which the ranks send them; a ``Supply``."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    def fill(self, plan: Plan, storages: Sequence[torch.Tensor]) -> None:
        """Copy out of bands, wherever these are; compute on the host."""
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
    """Some bands of an image, as a reader of it."""

    def __init__(self, bands: Sequence[ImagePart]) -> None:
        self._bands = bands
        self._lows = [band.low for band in bands]

    def at(self, offset: int) -> ImagePart:
        """Return the band that has byte ``offset``."""
        return self._bands[bisect_right(self._lows, offset) - 1]

    def read(self, file: int, offset: int, buffers: Sequence[memoryview]) -> None:
        self.at(offset).read(file, offset, buffers)


class WithinRanks:
    """The way of a push to targets in the ranks: each rank may have a part of the target."""

    #: Nobody connects.
    address = ""

    def __init__(
        self, target: nn.Module | Receiver | None, driver: Driver | None, strict: bool, world: World
    ) -> None:
        """Collective. ``target`` is None on ranks that have nothing of it."""
        self._world = world
        has = world.all_gather_object(target is not None, "looking where the target is")
        # The ranks of the target, as its engine counts them. If these are some only, they have no group of
        # their own, and nothing may be asked of the target for which they would meet.
        there = world if all(has) else World(sum(has[: world.rank]), sum(has), None)
        self._target: ModelTarget | EngineTarget | None = None
        with world.phase("beginning a refit"):
            if isinstance(target, nn.Module):
                self._target = ModelTarget(target, there)
            elif target is not None:
                self._target = EngineTarget(target, driver, strict, world.rank)
        name = None if self._target is None else self._target.name
        self._names = world.all_gather_object(name, "naming the workers")
        self._takers: Takers | None = None
        self._told: object = None

    @property
    def name(self) -> str:
        """Name of the transport, with the kind of accelerator that bands are on."""
        kind = self._device.type
        return "local" if kind == "cpu" else f"local ({kind})"

    def look(self) -> Mapping[str, Entry]:
        """Return the tensors of a target that is a model; collective."""
        target, world = self._target, self._world
        with world.phase("looking at the target"):
            found = {} if target is None else dict(target.look())
        # The same on every rank that has the target; the others have to know it.
        listed = world.all_gather_object(list(found.values()), "looking at the target")
        return {entry[0]: entry for entry in next((each for each in listed if each), [])}

    def meet(self, ready: ModelWrites) -> Takers:
        """Agree on who takes what; collective."""
        world = self._world
        own = Runs.of_writes(ready.plan, ready.image.layout)
        with world.phase("planning"):
            wants, sets = (None, []) if self._target is None else self._target.plan(ready.image)
            taken = None if wants is None else wants.to_bytes()
        told = world.all_gather_object(
            (own.to_bytes(), taken, [each.to_bytes() for each in sets]), "planning the messages"
        )
        if self._takers is None or self._told != (ready.image.entries, told):
            self._told = ready.image.entries, told
            self._owns = [Runs.from_bytes(data) for data, *_ in told]
            self._wants = [Runs.from_bytes(data or b"") for _, data, _ in told]
            self._takers = Takers.of(ready.image, self._names, self._wants, [sums for *_, sums in told])
        self._device = self._choose_device(ready)
        return self._takers

    def move(self, ready: ModelWrites, sums: SetSums) -> int:
        """Bring everything to the targets; return the bytes that ranks sent each other; collective."""
        rounds = Rounds(ready, self._owns, self._wants, sums, self._world, self._device)
        if self._target is not None:
            self._target.take(rounds)
        rounds.finish()
        stays = sum(own.intersect(want).nbytes for own, want in zip(self._owns, self._wants, strict=True))
        return sum(runs.nbytes for runs in self._wants) - stays

    def serve(self, version: int, sums: Sequence[Sequence[Sums]]) -> None:
        """Compare what has arrived, and tell the engines; collective."""
        world, failed = self._world, ""
        with world.phase("comparing what was moved"):
            if self._target is not None:
                self._target.check(sums[world.rank], version)
        try:
            if self._target is not None:
                self._target.serve(version)
        except Exception as error:  # an engine's call raises anything
            failed = (
                f"all workers have version {version}, but the call of the engine within rank {world.rank} "
                f"failed: {error}"
            )
        if failures := [text for text in world.all_gather_object(failed, "telling the engines") if text]:
            raise PeerError("; ".join(failures))

    def close(self, is_over: bool) -> None:
        """Do nothing: only both sides are held."""

    def _choose_device(self, ready: ModelWrites) -> torch.device:
        """Choose where bands are: on the accelerator if all weights are, and the group carries its tensors.

        Collective: the same kind on every rank.
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
