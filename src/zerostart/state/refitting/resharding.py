"""The weights of one sharded model into another one of the same ranks: another engine, mesh, dtype or number.

The image of a save is gone through in bands that every rank cuts alike. Of each band a rank puts in what the
source has on it, ranks send each other what their targets lack, and what the targets want is taken out. So
nobody has more than a band, and nothing is gathered.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn

from zerostart.checkpoint.catalog import TensorEntry
from zerostart.checkpoint.digest import Digests
from zerostart.checkpoint.storage.direct import PAGE
from zerostart.checkpoint.write.shards import SaveLayout
from zerostart.distributed.world import World, current_world, default_device
from zerostart.engines import Master, Shard, whole_shard
from zerostart.errors import ConfigError, VerifyError
from zerostart.geometry.layout import Layout
from zerostart.live.model import LiveModel
from zerostart.recipe import Recipe, torch_dtype
from zerostart.state.editing import differing_bits, master_of
from zerostart.state.refitting.image import Entry, Image
from zerostart.state.refitting.refitter import (
    CHUNK,
    Pushing,
    PushReport,
    RefitSettings,
    timed,
)
from zerostart.state.refitting.sums import SetSums, differing
from zerostart.state.refitting.transports.base import ImageWriter
from zerostart.state.resuming.background import settle_last
from zerostart.state.saving.adapters import has_adapters
from zerostart.state.saving.contents import contents_of
from zerostart.state.saving.save import SaveRequest, contents_to_save
from zerostart.state.saving.writing import planned
from zerostart.transfer.meter import PeakMeter
from zerostart.transfer.planning.runs import Runs
from zerostart.transfer.planning.writes import Origin, Write, WritePlan, plan_writes
from zerostart.transfer.staging import copy_strided
from zerostart.transfer.tuning import push_threads
from zerostart.transfer.writing import Source, write_out

#: Bytes of the image that are on their way at a time, beside one window of a tensor.
BAND = 32 << 20


@dataclass(frozen=True)
class _Taken:
    """A tensor of the target, as far as this rank has it."""

    recipe: Recipe
    shard: Shard
    #: None for a buffer.
    parameter: nn.Parameter | None


@dataclass
class _Target:
    """What this rank's part of the target takes; nothing where the target is on other ranks."""

    entries: dict[str, Entry] = field(default_factory=dict)
    taken: list[_Taken] = field(default_factory=list)

    @classmethod
    def of(cls, live: LiveModel) -> _Target:
        tensors, _ = live.tensors()
        named = dict(live.module.named_parameters(remove_duplicate=False))
        buffers = dict(live.module.named_buffers(remove_duplicate=False))
        items = {item.name: item for item in tensors}
        contents = contents_of(live, tensors, None)
        found = cls({entry[0]: entry for entry in contents.entries})
        for one in contents.outgoing:
            item = items[one.recipe.target.name]
            # Every rank has a buffer of its own, of which a save takes the first one's alone.
            shard = (
                item.shard
                if item.is_parameter
                else whole_shard(item.name, buffers[item.current_name], live.world)
            )
            parameter = named[item.current_name] if item.is_parameter else None
            found.taken.append(_Taken(one.recipe, shard, parameter))
        return found

    def planned(self, layout: SaveLayout) -> WritePlan:
        """The windows of the image that this rank takes from; to be run backwards."""

        def wanted() -> Iterator[tuple[Recipe, Layout, Origin]]:
            for one in self.taken:
                storage = one.shard.storage
                direct = storage.device.type == "cpu"
                yield one.recipe, one.shard.layout, Origin(one.shard.name, storage.dtype, direct)

        return plan_writes(layout, wanted(), CHUNK)


@dataclass(frozen=True)
class _Way:
    """How the image goes from the source to the target: the same for every push that finds both alike."""

    image: Image
    own: Runs
    wants: Runs
    #: By rank: what this one sends it, and what it gets from it.
    sends: Sequence[Runs]
    receives: Sequence[Runs]
    #: What any rank wants, and the number of this rank's; None where it wants nothing.
    sets: Sequence[Runs]
    number: int | None
    #: Bytes that all ranks send, and that all of them want.
    moved: int
    wanted: int


class ModelRefitter:
    """Brings another model to the weights of a model; every rank has one, see ``zerostart.refit``."""

    def __init__(
        self, model: nn.Module, target: nn.Module | None, settings: RefitSettings, world: World | None = None
    ) -> None:
        """Collective. ``target`` is None on ranks that hold nothing of it. Raises as ``zerostart.refit``."""
        self.version = 0
        self.address = ""
        self._model, self._target, self._settings = model, target, settings
        self._world = world = world or current_world()
        self._way: _Way | None = None
        self._told: tuple[int, ...] | None = None
        self._closed = False
        has = world.all_gather_object(target is not None, "looking where the target is")
        # The ranks of the target, as its engine counts them. Where these are some alone, nothing is asked of
        # it that ranks would meet for: they have no group of their own.
        self._there = world if all(has) else World(sum(has[: world.rank]), sum(has), None)
        with world.phase("beginning a refit"):
            settings.check()
            if settings.transport not in (None, "local") or settings.workers is not None:
                raise ConfigError(
                    "transport= and workers= are for workers; a model is brought to the weights of "
                    "another one by the ranks themselves: leave them out"
                )
            if target is model:
                raise ConfigError("target is the model itself: pass another model, or an address of workers")
            if target is not None and has_adapters(LiveModel(target, self._there).module):
                raise ConfigError(
                    "target has adapters of PEFT, which are no weights of the model: merge them "
                    "(merge_and_unload), or pass the model without them"
                )

    def __enter__(self) -> ModelRefitter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def push(self, wait: bool = True) -> PushReport | Pushing:
        """Bring the target to the weights as they are now; collective.

        With ``wait=False`` the same, with a handle for what it gives. fp32 masters of the target follow as
        after an edit. Raises, the same on every rank: ConfigError where the target has a tensor that the
        model has not, VerifyError where a target's values are not those that were sent.
        """
        if self._closed:
            raise ConfigError("this refit is closed: call zerostart.refit again")
        world, begun = self._world, time.perf_counter()
        phases: dict[str, float] = {}
        with PeakMeter(default_device()) as meter, world.phase("pushing weights into a model"):
            with timed(phases, "plan"):
                # A save in the background may still copy the shards that are about to change.
                settle_last()
                way, source, storages, target, plan = self._prepared()
            sums = SetSums(way.image, way.sets)
            with timed(phases, "move"):
                _move(way, source, storages, target, plan, world, sums)
            with timed(phases, "agree"), world.phase("comparing what was moved"):
                expected = sums.summed(world)
                if way.number is not None:
                    _check(way.image, target, plan, expected[way.number])
        self.version += 1
        phases["total"] = time.perf_counter() - begun
        figures = world.all_gather_object(
            (phases, meter.host_bytes, meter.device_bytes or 0), "figures of a push"
        )
        report = PushReport(
            self.version,
            None,
            "local",
            {key: max(each[0][key] for each in figures) for key in phases},
            way.image.layout.total_size,
            way.image.layout.total_size,
            way.moved,
            way.wanted,
            0,
            max(each[1] for each in figures),
            max(each[2] for each in figures),
            (),
        )
        return report if wait else Pushing(world, lambda: report)

    def close(self) -> None:
        """End it; nothing is held but both models."""
        self._closed = True

    def _prepared(self) -> tuple[_Way, WritePlan, list[Source], _Target, WritePlan]:
        """The way, what this rank puts in out of which storages, and what it takes out; collective."""
        world = self._world
        with world.phase("looking at the models"):
            live = LiveModel(self._model, world)
            request = SaveRequest(dtype=self._settings.dtype, merge_adapters=has_adapters(live.module))
            contents, _ = contents_to_save(self._model, live, request)
            target = _Target()
            if self._target is not None:
                receiving = LiveModel(self._target, self._there)
                # First: a parameter that is still gathered would be used in the place of its shard.
                receiving.drop_gathered()
                target = _Target.of(receiving)
        # The same on every rank that has the target; the others have to know it.
        listed = world.all_gather_object(list(target.entries.values()), "looking at the target")
        known = next((each for each in listed if each), [])
        with world.phase("planning"):
            image = Image.of(_as_wanted(contents.entries, {entry[0]: entry for entry in known}))
            source, storages = planned(image.layout, contents.outgoing, CHUNK)
            plan = target.planned(image.layout)
            own, wants = Runs.of_writes(source, image.layout), Runs.of_writes(plan, image.layout)
        told = world.all_gather_object((own.to_bytes(), wants.to_bytes()), "planning the messages")
        with world.phase("planning the messages"):
            way = self._way
            if way is None or way.image.entries != image.entries or self._told != _known(told):
                owns = [Runs.from_bytes(each) for each, _ in told]
                wanted = [Runs.from_bytes(each) for _, each in told]
                sets = list({runs.to_bytes(): runs for runs in wanted if runs.nbytes}.values())
                keys = [runs.to_bytes() for runs in sets]
                stays = sum(o.intersect(w).nbytes for o, w in zip(owns, wanted, strict=True))
                total = sum(runs.nbytes for runs in wanted)
                way = _Way(
                    image,
                    own,
                    wants,
                    [own.intersect(runs) for runs in wanted],
                    [runs.intersect(wants) for runs in owns],
                    sets,
                    keys.index(wants.to_bytes()) if wants.nbytes else None,
                    total - stays,
                    total,
                )
                if sum(runs.nbytes for runs in way.receives) != wants.nbytes:
                    raise ConfigError("no rank has some of what the target wants; this is a bug in zerostart")
                self._way, self._told = way, _known(told)
        return way, source, storages, target, plan


def _known(told: Sequence[tuple[bytes, bytes]]) -> tuple[int, ...]:
    return tuple(map(hash, told))


def _as_wanted(entries: Sequence[Entry], wanted: dict[str, Entry]) -> list[Entry]:
    """The source's ``entries``, in the target's dtypes where these are narrower.

    Raises ConfigError for what the target has and the source has not, or has in another shape.
    """
    shapes = {name: tuple(shape) for name, _, shape in entries}
    missing = [name for name in wanted if name not in shapes]
    if missing:
        raise ConfigError(
            f"the target has {len(missing)} tensors that the model has not ({', '.join(missing[:3])}): pass "
            "two models of one architecture"
        )
    found: list[Entry] = []
    for name, dtype, shape in entries:
        other = wanted.get(name)
        if other is not None:
            if tuple(other[2]) != tuple(shape):
                raise ConfigError(
                    f"tensor {name} is {list(shape)} in the model and {list(other[2])} in the target: pass "
                    "two models of one architecture"
                )
            # Rounded before it is sent, and only once: fewer bytes, and the very same values.
            held, given = torch_dtype(dtype, name), torch_dtype(other[1], name)
            if given.is_floating_point and held.is_floating_point and given.itemsize < held.itemsize:
                dtype = other[1]
        found.append((name, dtype, tuple(shape)))
    return found


def bands(layout: SaveLayout, chunk: int, limit: int) -> list[tuple[int, int]]:
    """The image in parts of ``limit`` bytes or little more, none of which ends within a window of a write."""
    edges: list[int] = []
    for entry in sorted(layout.tensors.values(), key=lambda entry: entry.offset):
        if entry.nbytes:
            edges += _windows(entry, chunk)
    if not edges:
        return []
    found, begin = [], edges[0]
    for edge in [*edges[1:], layout.files[0].size]:
        if edge - begin >= limit:
            found.append((begin, edge))
            begin = edge
    if begin < layout.files[0].size:
        found.append((begin, layout.files[0].size))
    return found


def _windows(entry: TensorEntry, chunk: int) -> list[int]:
    """Where the windows of a tensor begin in the file; see ``plan_writes``."""
    width = torch_dtype(entry.dtype, entry.name).itemsize
    size = max(1, chunk // width) * width
    lead = entry.offset % PAGE // width * width
    return [entry.offset, *range(entry.offset + size - lead, entry.offset + entry.nbytes, size)]


class _Band(ImageWriter):
    """A part of the image in memory; also what a plan of writes writes to."""

    def __init__(self, layout: SaveLayout, low: int, high: int) -> None:
        super().__init__(layout)
        self.low, self.high = low, high
        # Elements lie as in the file, and there at multiples of their size.
        self._base = low - low % 64
        self._data = torch.empty(high - self._base, dtype=torch.uint8, device="cpu")

    def put(self, place: int, data: torch.Tensor, length: int, step: int, rows: int) -> None:
        """Copy to where it lies in the image."""
        self._rows(place, length, step, rows).copy_(data.as_strided((rows, length), (step, 1)))

    def pack(self, runs: Runs, out: torch.Tensor) -> None:
        """The bytes of ``runs``, one after the other."""
        done = 0
        for start, width, stride, count in runs.rows.tolist():
            part = out[done : done + width * count]
            part.view(count, width).copy_(self._rows(start, width, stride, count))
            done += width * count

    def unpack(self, runs: Runs, packed: torch.Tensor) -> None:
        """What ``pack`` has made, back in its places."""
        done = 0
        for start, width, stride, count in runs.rows.tolist():
            part = packed[done : done + width * count]
            self._rows(start, width, stride, count).copy_(part.view(count, width))
            done += width * count

    def elements(self, write: Write) -> torch.Tensor:
        """The span of a write, 1-D."""
        width = write.dtype.itemsize
        begin = self._tensors[write.name].offset + write.first * width - self._base
        return self._data[begin : begin + write.span * width].view(write.dtype)

    def _rows(self, start: int, width: int, stride: int, count: int) -> torch.Tensor:
        return self._data.as_strided((count, width), (stride or width, 1), start - self._base)


def _move(
    way: _Way,
    source: WritePlan,
    storages: Sequence[Source],
    target: _Target,
    plan: WritePlan,
    world: World,
    sums: SetSums,
) -> None:
    """All bands, one after the other; collective."""
    layout = way.image.layout
    puts, takes = _by_band(source, layout), _by_band(plan, layout)
    with world.phase("moving weights"):
        for low, high in bands(layout, CHUNK, BAND):
            band = _Band(layout, low, high)
            here = replace(source, writes=tuple(puts(high)))

            def packed(band: _Band = band, here: WritePlan = here) -> _Messages:
                write_out(here, storages, band, push_threads(), sums.add_rows)
                return _Messages(way, band, world.rank)

            if world.size == 1:
                packed()
            else:
                with world.collectives("sending weights", packed) as messages:
                    dist.all_to_all_single(
                        messages.incoming, messages.outgoing, messages.gets, messages.gives, group=world.group
                    )
                messages.deliver()
            _take(band, takes(high), target)


class _Messages:
    """What this rank sends of a band, and room for what it gets."""

    def __init__(self, way: _Way, band: _Band, rank: int) -> None:
        self._band = band
        empty = Runs.of([])

        def parts(each: Sequence[Runs]) -> list[Runs]:
            return [
                empty if other == rank else runs.within(band.low, band.high)
                for other, runs in enumerate(each)
            ]

        sends, self._receives = parts(way.sends), parts(way.receives)
        self.gives = [runs.nbytes for runs in sends]
        self.gets = [runs.nbytes for runs in self._receives]
        self.outgoing = torch.empty(sum(self.gives), dtype=torch.uint8, device="cpu")
        self.incoming = torch.empty(sum(self.gets), dtype=torch.uint8, device="cpu")
        for runs, place in zip(sends, accumulate([0, *self.gives]), strict=False):
            band.pack(runs, self.outgoing[place : place + runs.nbytes])

    def deliver(self) -> None:
        """What others sent into the band."""
        for runs, place in zip(self._receives, accumulate([0, *self.gets]), strict=False):
            self._band.unpack(runs, self.incoming[place : place + runs.nbytes])


def _by_band(plan: WritePlan, layout: SaveLayout) -> Callable[[int], list[Write]]:
    """Asked with the end of each band in turn: the writes of that band."""
    writes = iter(plan.writes)
    ahead = next(writes, None)

    def until(high: int) -> list[Write]:
        nonlocal ahead
        found = []
        while (
            ahead is not None
            and layout.tensors[ahead.name].offset + ahead.first * ahead.dtype.itemsize < high
        ):
            found.append(ahead)
            ahead = next(writes, None)
        return found

    return until


def _take(band: _Band, writes: Sequence[Write], target: _Target) -> None:
    """Run writes of the target backwards: elements of the band into its shards, and into their masters."""
    with contextlib.ExitStack() as stack, torch.no_grad():
        masters: dict[int, Master | None] = {}
        for write in writes:
            window, width = band.elements(write), write.dtype.itemsize
            for part in write.parts:
                one = target.taken[part.target]
                if part.target not in masters:
                    masters[part.target] = (
                        None if one.parameter is None else stack.enter_context(master_of(one.parameter))
                    )
                count = 1 + sum((size - 1) * local for size, _, local in part.loops)
                held = one.shard.storage.detach()[part.to : part.to + count]
                master = masters[part.target]
                before = held.clone() if master is not None else None
                copy_strided(held, 0, window[part.at // width :], part.loops)
                if master is not None and before is not None:
                    _follow(master, part.to, before, held)


def _follow(master: Master, place: int, before: torch.Tensor, now: torch.Tensor) -> None:
    """Put into a master what has changed of the elements of its shard from ``place`` on.

    It has more bits than those: where they stay as they were, so does the master.
    """
    first, values = master
    low, high = max(place, first), min(place + now.numel(), first + values.numel())
    if low < high:
        inside = slice(low - place, high - place)
        chosen = differing_bits(before[inside], now[inside]).to(values.device)
        kept = values[low - first : high - first]
        kept.copy_(torch.where(chosen, now[inside].to(values.device, values.dtype), kept))


def _check(image: Image, target: _Target, plan: WritePlan, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Read the target's shards, and compare their sums with those of what was sent."""
    entries = {entry[0]: entry for entry in image.entries}
    digests = Digests(entries[name] for name in expected)
    storages = [Source(one.shard.storage.detach()) for one in target.taken]
    write_out(plan, storages, None, push_threads(), digests.add_rows)
    wrong = differing(expected, digests.sums())
    if wrong:
        raise VerifyError(
            f"{len(wrong)} tensors of the target are not what was sent ({', '.join(wrong[:3])}): the target "
            "is not to be used; push again"
        )
