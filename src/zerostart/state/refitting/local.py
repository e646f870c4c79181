"""Weights into what lives in the trainer's own ranks: another sharded model, or workers of an engine.

Nobody listens and nothing is decided by one: the ranks do it together, round by round (``bands.py``). What a
rank has itself goes from its shards into the target by a band of bounded size; there is no image.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from zerostart.distributed.world import World, current_world, default_device
from zerostart.errors import ConfigError, PeerError
from zerostart.live.model import LiveModel
from zerostart.recipe import torch_dtype
from zerostart.recipe.dtypes import holds
from zerostart.state.refitting.bands import Rounds, Routes
from zerostart.state.refitting.image import Entry, Image
from zerostart.state.refitting.pushes import (
    Prepared,
    Pushing,
    PushReport,
    RefitSettings,
    WorkerReport,
    prepared,
    timed,
    untaken,
)
from zerostart.state.refitting.receiver import Receiver
from zerostart.state.refitting.sums import SetSums, digest_of
from zerostart.state.refitting.takers import EngineTaker, ModelTaker, Taker
from zerostart.state.refitting.targets import Driver
from zerostart.state.refitting.transports.base import WorkerLost
from zerostart.state.saving.adapters import has_adapters
from zerostart.transfer.meter import PeakMeter
from zerostart.transfer.planning.runs import Runs

#: Of a push that the ranks make among themselves.
NAME = "local"


@dataclass(frozen=True)
class _Way:
    """How the image goes from the source to the target: the same for every push that finds both alike."""

    routes: Routes
    #: Of each set of elements that any rank sums up, once; and by rank the numbers of its sets.
    sums: SetSums
    numbers: Sequence[Sequence[int]]
    untaken: tuple[str, ...]


class LocalRefitter:
    """Brings what lives in the ranks to a model's weights; every rank has one, see ``zerostart.refit``."""

    def __init__(
        self,
        model: nn.Module,
        target: nn.Module | Receiver | None,
        driver: Driver | None,
        settings: RefitSettings,
        world: World | None = None,
    ) -> None:
        """Collective. ``target``, a model or an engine's receiver, is None on ranks that have nothing of it.

        ``driver`` is the engine's, where there is one. Raises as ``zerostart.refit``.
        """
        self.version = 0
        self.address = ""
        self._model, self._settings = model, settings
        self._world = world = world or current_world()
        self._image: Image | None = None
        self._way: _Way | None = None
        self._told: tuple[int, ...] | None = None
        self._closed = False
        has = world.all_gather_object(target is not None, "looking where the target is")
        # The ranks of the target, as its engine counts them. Where these are some alone, nothing is asked of
        # it that ranks would meet for: they have no group of their own.
        there = world if all(has) else World(sum(has[: world.rank]), sum(has), None)
        with world.phase("beginning a refit"):
            settings.check()
            if settings.transport not in (None, NAME) or settings.workers is not None:
                raise ConfigError(
                    "transport= and workers= are for workers in processes of their own; what lives in the "
                    "trainer's ranks is brought to the weights by these: leave them out"
                )
            if target is model:
                raise ConfigError("target is the model itself: pass another model, or an address of workers")
            if isinstance(target, nn.Module) and has_adapters(LiveModel(target, there).module):
                raise ConfigError(
                    "target has adapters of PEFT, which are no weights of the model: merge them "
                    "(merge_and_unload), or pass the model without them"
                )
        self._taker: Taker | None = None
        if isinstance(target, nn.Module):
            self._taker = ModelTaker(target, there)
        elif target is not None:
            self._taker = EngineTaker(target, driver, settings.strict)
        name = None
        if isinstance(target, Receiver):
            name = target.name or f"rank {world.rank}"
        #: By rank the name of its worker; None where there is none.
        self._names = world.all_gather_object(name, "naming the workers")
        # What an engine cannot take is told before anything else is done.
        self._prepare()

    def __enter__(self) -> LocalRefitter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def push(self, wait: bool = True) -> PushReport | Pushing:
        """Bring the target to the weights as they are now; collective.

        With ``wait=False`` the same, with a handle for what it gives. fp32 masters of a model follow as after
        an edit. Raises, the same on every rank: ConfigError where a model has a tensor that the source has
        not, ConversionError where an engine's loader cannot be followed, and the target is as it was then;
        VerifyError where a target's values are not those that were sent, and what an engine raises, and the
        target is of no version then until the next push.
        """
        if self._closed:
            raise ConfigError("this refit is closed: call zerostart.refit again")
        world, taker, begun = self._world, self._taker, time.perf_counter()
        phases: dict[str, float] = {}
        with PeakMeter(default_device()) as meter, world.phase("pushing weights within the ranks"):
            with timed(phases, "plan"):
                ready, way = self._prepare()
                device = self._device(ready)
            sums = way.sums
            sums.begin()
            with timed(phases, "move"), world.phase("moving weights"):
                rounds = Rounds(way.routes, ready.plan, ready.storages, sums, world, device)
                if taker is not None:
                    taker.take(rounds)
                rounds.finish()
            with timed(phases, "agree"), world.phase("comparing what was moved"):
                expected = sums.summed(world)
                if taker is not None:
                    taker.check([expected[number] for number in way.numbers[world.rank]])
        self.version = version = self.version + 1
        try:
            with world.phase("telling the engines"):
                if taker is not None:
                    self._tell(taker, version)
        except WorkerLost as error:  # on all ranks, which are there
            raise PeerError(str(error)) from error
        phases["total"] = time.perf_counter() - begun
        report = self._report(way, phases, meter, expected, device)
        return report if wait else Pushing(world, lambda: report)

    def close(self) -> None:
        """End it; nothing is held but both sides."""
        self._closed = True

    def _tell(self, taker: Taker, version: int) -> None:
        try:
            taker.served(version)
        except Exception as error:  # an engine's call raises whatever it wants
            raise WorkerLost(
                f"all workers have version {version}, but the call of the engine within rank "
                f"{self._world.rank} failed: {error}"
            ) from error

    def _report(
        self,
        way: _Way,
        phases: Mapping[str, float],
        meter: PeakMeter,
        sums: Sequence[Mapping[str, tuple[int, ...]]],
        device: torch.device,
    ) -> PushReport:
        image = way.routes.image
        figures = self._world.all_gather_object(
            (dict(phases), meter.host_bytes, meter.device_bytes or 0, way.routes.wants.nbytes),
            "figures of a push",
        )
        workers = tuple(
            WorkerReport(
                name, self.version, each[3], each[0]["move"], digest_of([sums[number] for number in numbers])
            )
            for name, each, numbers in zip(self._names, figures, way.numbers, strict=True)
            if name is not None
        )
        return PushReport(
            self.version,
            None,
            NAME if device.type == "cpu" else f"{NAME} ({device.type})",
            {key: max(each[0][key] for each in figures) for key in phases},
            image.layout.total_size,
            image.layout.total_size,
            way.routes.moved,
            way.routes.wanted,
            0,
            max(each[1] for each in figures),
            max(each[2] for each in figures),
            workers,
            way.untaken,
        )

    def _device(self, ready: Prepared) -> torch.device:
        """Where bands lie: on the accelerator if all weights do, and the ranks' group carries its tensors.

        Collective: the same kind on every rank.
        """
        kinds = {source.storage.device.type for source in ready.storages}
        if self._taker is not None:
            kinds.add(self._taker.device.type)
        kind = kinds.pop() if len(kinds) == 1 else "cpu" if kinds else None
        carried = self._world.size == 1 or (kind is not None and f"{kind}:" in str(dist.get_backend_config()))
        every = self._world.all_gather_object(kind if carried or kind is None else "cpu", "choosing a device")
        chosen = {each for each in every if each is not None}
        if len(chosen) != 1 or chosen == {"cpu"}:
            return torch.device("cpu")
        device = default_device()
        return device if chosen == {device.type} else torch.device("cpu")

    def _prepare(self) -> tuple[Prepared, _Way]:
        """What this rank has where, and the way from there to the targets; collective."""
        world, taker = self._world, self._taker
        with world.phase("looking at the models"):
            entries = {} if taker is None else dict(taker.look())
        # The same on every rank that has the target; the others have to know it.
        listed = world.all_gather_object(list(entries.values()), "looking at the target")
        known = {entry[0]: entry for entry in next((each for each in listed if each), [])}
        ready = prepared(
            self._model,
            self._settings,
            world,
            self._image,
            lambda found: _as_wanted(found, known, self._settings.strict),
        )
        self._image = image = ready.image
        with world.phase("planning"):
            own = Runs.of_writes(ready.plan, image.layout)
            wants = None if taker is None else taker.plan(image)
            mine = [] if wants is None else [runs.to_bytes() for runs in (wants.runs, *wants.sets)]
        told = world.all_gather_object((own.to_bytes(), mine), "planning the messages")
        hashes = tuple(hash((image.fingerprint, given, tuple(taken))) for given, taken in told)
        with world.phase("planning the messages"):
            if self._way is None or self._told != hashes:
                self._way, self._told = self._planned(image, told), hashes
        return ready, self._way

    def _planned(self, image: Image, told: Sequence[tuple[bytes, list[bytes]]]) -> _Way:
        wanted = [Runs.from_bytes(taken[0]) if taken else Runs.of([]) for _, taken in told]
        routes = Routes.of(image, [Runs.from_bytes(own) for own, _ in told], wanted, self._world.rank)
        if sum(runs.nbytes for runs in routes.receives) != routes.wants.nbytes:
            raise ConfigError("no rank has some of what the target wants; this is a bug in zerostart")
        sets: dict[bytes, tuple[int, Runs]] = {}
        # Replicas want the same, which is summed up once.
        numbers = [
            [sets.setdefault(each, (len(sets), Runs.from_bytes(each)))[0] for each in taken[1:]]
            for _, taken in told
        ]
        sums = SetSums(image, [runs for _, runs in sets.values()])
        return _Way(routes, sums, numbers, untaken(image, wanted))


def _as_wanted(entries: Sequence[Entry], wanted: Mapping[str, Entry], strict: bool) -> list[Entry]:
    """The source's ``entries``, in the target's dtypes where these cannot hold all that the source's can.

    ``wanted`` are those of a target that is a model, none where it is an engine. Raises ConfigError for what
    the target has and the source has not, or has in another shape, and with ``strict`` for what the target
    has not.
    """
    shapes = {name: tuple(shape) for name, _, shape in entries}
    missing = [name for name in wanted if name not in shapes]
    if missing:
        raise ConfigError(
            f"the target has {len(missing)} tensors that the model has not ({', '.join(missing[:3])}): pass "
            "two models of one architecture, or as an engine what has load_weights"
        )
    lost = [name for name in shapes if name not in wanted] if wanted and strict else []
    if lost:
        raise ConfigError(
            f"the model has {len(lost)} tensors that the target has not ({', '.join(lost[:3])}), and the "
            "target would not compute what the model does: pass two models of one architecture (weights tied "
            "in both or in neither), or strict=False to zerostart.refit if that is as it should be"
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
            if given.is_floating_point and held.is_floating_point and not holds(given, held):
                dtype = other[1]
        found.append((name, dtype, tuple(shape)))
    return found
