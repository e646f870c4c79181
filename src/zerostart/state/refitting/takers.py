"""What takes weights within a rank of the trainer: a part of another sharded model, or of an engine."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from zerostart.checkpoint.digest import Digests
from zerostart.checkpoint.storage import Reader
from zerostart.checkpoint.write.shards import SaveLayout
from zerostart.distributed.world import World
from zerostart.engines import Master, Shard, whole_shard
from zerostart.errors import VerifyError
from zerostart.geometry.layout import Layout
from zerostart.live.model import LiveModel
from zerostart.recipe import Recipe
from zerostart.state.editing import differing_bits, master_of
from zerostart.state.refitting.bands import Band, Rounds
from zerostart.state.refitting.image import Entry, Image
from zerostart.state.refitting.pushes import CHUNK, PAGE
from zerostart.state.refitting.receiver import Receiver, Wants, sum_read
from zerostart.state.refitting.sums import Sums, differing
from zerostart.state.refitting.targets import Driver
from zerostart.state.saving.contents import contents_of
from zerostart.transfer.execute import Progress, execute
from zerostart.transfer.planning import Plan
from zerostart.transfer.planning.runs import Runs
from zerostart.transfer.planning.writes import Origin, Write, WritePlan, plan_writes
from zerostart.transfer.staging import HostStaging, copy_strided
from zerostart.transfer.tuning import push_threads
from zerostart.transfer.writing import Source, write_out


@dataclass(frozen=True)
class _Taken:
    """A tensor of the target, as far as this rank has it."""

    recipe: Recipe
    shard: Shard
    #: None for a buffer.
    parameter: nn.Parameter | None


class Taker(Protocol):
    """A rank's part of a target. ``look`` and ``take`` are called by all ranks that have one."""

    def look(self) -> Mapping[str, Entry]:
        """See what is there now; its tensors by name, none where it takes what comes; collective."""
        ...

    def plan(self, image: Image) -> Wants:
        """What it takes of an image. Raises ConversionError where it cannot."""
        ...

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        ...

    def take(self, rounds: Rounds) -> None:
        """Take all of it; collective with those that call ``rounds.finish``."""
        ...

    def check(self, sums: Sequence[Sums]) -> None:
        """Raise VerifyError where what it has differs from the sums of the sets of ``plan``."""
        ...

    def served(self, version: int) -> None:
        """All ranks have the version."""
        ...


class ModelTaker:
    """This rank's part of another sharded model."""

    def __init__(self, model: nn.Module, world: World) -> None:
        """``world`` has the ranks that the model is on."""
        self._model, self._world = model, world
        self._taken: list[_Taken] = []
        self._plan: WritePlan | None = None

    def look(self) -> Mapping[str, Entry]:
        """As ``Taker``."""
        live = LiveModel(self._model, self._world)
        # First: a parameter that is still gathered would be used in the place of its shard.
        live.drop_gathered()
        tensors, _ = live.tensors()
        named = dict(live.module.named_parameters(remove_duplicate=False))
        buffers = dict(live.module.named_buffers(remove_duplicate=False))
        items = {item.name: item for item in tensors}
        contents = contents_of(live, tensors, None)
        self._taken = []
        for one in contents.outgoing:
            item = items[one.recipe.target.name]
            # Every rank has a buffer of its own, of which a save takes the first one's alone.
            shard = (
                item.shard
                if item.is_parameter
                else whole_shard(item.name, buffers[item.current_name], live.world)
            )
            parameter = named[item.current_name] if item.is_parameter else None
            self._taken.append(_Taken(one.recipe, shard, parameter))
        return {entry[0]: entry for entry in contents.entries}

    def plan(self, image: Image) -> Wants:
        """The windows of the image that this rank takes from; to be run backwards."""

        def wanted() -> Iterator[tuple[Recipe, Layout, Origin]]:
            for one in self._taken:
                storage = one.shard.storage
                direct = storage.device.type == "cpu"
                yield one.recipe, one.shard.layout, Origin(one.shard.name, storage.dtype, direct)

        self._image, self._plan = image, plan_writes(image.layout, wanted(), CHUNK, PAGE)
        runs = Runs.of_writes(self._plan, image.layout)
        return Wants(runs, (runs,) if runs.nbytes else ())

    @property
    def device(self) -> torch.device:
        """As ``Taker``."""
        return next((one.shard.storage.device for one in self._taken), torch.device("cpu"))

    def take(self, rounds: Rounds) -> None:
        """As ``Taker``: in the image's order, and so in that of the other ranks."""
        assert self._plan is not None, "planned before"
        takes = _by_band(self._plan, self._image.layout)
        for ranges in rounds.windows.all():
            for band in rounds.bring(ranges):
                self._take(band, takes(band.high))

    def check(self, sums: Sequence[Sums]) -> None:
        """Read the shards, and compare."""
        if not sums:
            return
        (expected,), plan = sums, self._plan
        assert plan is not None, "planned before"
        entries = {entry[0]: entry for entry in self._image.entries}
        digests = Digests(entries[name] for name in expected)
        storages = [Source(one.shard.storage.detach()) for one in self._taken]
        write_out(plan, storages, None, push_threads(), digests.add_rows)
        wrong = differing(expected, digests.sums())
        if wrong:
            raise VerifyError(
                f"{len(wrong)} tensors of the target are not what was sent ({', '.join(wrong[:3])}): the "
                "target is not to be used; push again"
            )

    def served(self, version: int) -> None:
        """A model counts no versions."""

    def _take(self, band: Band, writes: Sequence[Write]) -> None:
        """Run writes backwards: elements of the band into shards, and into their masters."""
        with contextlib.ExitStack() as stack, torch.no_grad():
            masters: dict[int, Master | None] = {}
            for write in writes:
                window, width = band.elements(write), write.dtype.itemsize
                for part in write.parts:
                    one = self._taken[part.target]
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


class EngineTaker:
    """An engine's worker that lives in this rank."""

    def __init__(self, receiver: Receiver, driver: Driver | None, strict: bool) -> None:
        """``driver`` is told of versions; None: nobody is."""
        self.receiver = receiver
        self._driver, self._strict = driver, strict
        self._known: tuple[str, Wants] | None = None

    def look(self) -> Mapping[str, Entry]:
        """As ``Taker``: its loader takes what comes."""
        return {}

    def plan(self, image: Image) -> Wants:
        """As ``Taker``."""
        if self._known is None or self._known[0] != image.fingerprint:
            self._known = image.fingerprint, self.receiver.plan(image, self._strict)
        self.receiver.renew(image, self._known[1])
        return self._known[1]

    @property
    def device(self) -> torch.device:
        """As ``Taker``."""
        return self.receiver.device

    def take(self, rounds: Rounds) -> None:
        """As ``Taker``: stage by stage of the engine's own."""
        self.receiver.take(_FromRanks(rounds))

    def check(self, sums: Sequence[Sums]) -> None:
        """As ``Taker``."""
        self.receiver.agree(sums)

    def served(self, version: int) -> None:
        """The engine has the version; raises what the engine's own call does."""
        self.receiver.version = version
        told = getattr(self._driver, "served", None)
        if told is not None:
            told(version)


class _FromRanks:
    """What a worker takes, of the rounds in which the ranks send it; a ``Supply``."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    def fill(self, plan: Plan, storages: Sequence[torch.Tensor]) -> None:
        """Copy what was read out of bands, wherever these lie; compute on the host."""
        windows, copies = self._rounds.windows, HostStaging(0)
        for reads, ranges in windows.batches((read, [(read.offset, read.end)]) for read in plan.reads):
            bands = _Bands(self._rounds.bring(ranges))
            for read in reads:
                data = bands.rows(read.offset, read.nbytes // read.rows, read.stride, read.rows)
                data = data.reshape(-1)
                for part in read.parts:
                    copies.put(part, data, storages[part.target])
        for computations, ranges in windows.batches(
            (each, [(read.offset, read.end) for read in each.reads]) for each in plan.computations
        ):
            bands = _Bands(self._rounds.bring(ranges))
            computed = replace(plan, reads=(), computations=computations)
            execute(computed, storages, Progress(0, False), push_threads(), bands)

    def sum(self, runs: Runs, digests: Digests) -> None:
        """The same for what is summed up alone."""
        parts = ((part, [(low, high) for low, high in part.spans.tolist()]) for part in runs.batches(CHUNK))
        for batch, ranges in self._rounds.windows.batches(parts):
            bands = _Bands(self._rounds.bring(ranges))
            for part in batch:
                sum_read(self._rounds.image, part, bands, digests)


class _Bands(Reader):
    """Some bands of an image, as a reader of it."""

    def __init__(self, bands: Sequence[Band]) -> None:
        self._bands = bands
        self._lows = [band.low for band in bands]

    def rows(self, offset: int, width: int, stride: int, count: int) -> torch.Tensor:
        """Rows of bytes, [count, width], where they lie."""
        return self._bands[bisect_right(self._lows, offset) - 1].rows(offset, width, stride, count)

    def read(self, file: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """See ``Reader``."""
        for buffer in buffers:
            torch.frombuffer(buffer, dtype=torch.uint8).copy_(self.rows(offset, len(buffer), 0, 1)[0])
            offset += len(buffer)


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
