"""``zerostart.refit``: pushing the weights of a live model into a target, by all trainer ranks together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from torch import nn

from zerostart.distributed.world import World, current_world, default_device
from zerostart.errors import ConfigError, PeerError
from zerostart.refit.drivers import Driver
from zerostart.refit.image import Entry, Image, SetSums, SharedImage, Sums, digest_of
from zerostart.refit.pushes import (
    ModelWrites,
    PushReport,
    RefitSettings,
    Takers,
    WorkerReport,
    fit_entries,
    prepare_model,
)
from zerostart.refit.receiver import Receiver
from zerostart.refit.server import WorkerServer
from zerostart.refit.wire import Channel, connect, socket_path
from zerostart.refit.within import WithinRanks
from zerostart.transfer.meter import PeakMeter
from zerostart.transfer.tuning import push_threads
from zerostart.transfer.writing import write_out


class Refitter:
    """Pushes versions of a model's weights to a target; every rank has one.

    A context manager; leaving it is ``close``, but after an error workers go on waiting for another trainer
    at the same address.
    """

    def __init__(self, model: nn.Module, target: object, settings: RefitSettings) -> None:
        """Collective. Raises as ``zerostart.refit``."""
        self._world = world = current_world()
        self._model, self._settings, self.version = model, settings, 0
        self._image: Image | None = None
        self._takers: Takers | None = None
        self._way: WithinRanks | WorkerProcesses | None = None
        _compare(settings, world)
        with world.phase("looking at the target"):
            settings.check()
            driver = _driver_of(target)
            inside = None if target is model else _inside(target, driver)
            known = target is None or isinstance(target, str) or driver is not None or inside is not None
            if target is model or not known:
                raise ConfigError(
                    f"target is {'the model itself' if target is model else f'a {type(target).__name__}'}: "
                    "pass an address for workers to connect with by zerostart.serving.serve, vLLM's LLM, "
                    "SGLang's Engine, the http:// address of a server of either, a module with load_weights, "
                    "a zerostart.serving.Receiver of it, or another sharded model"
                )
        kind = "none" if target is None else "other" if driver is None else "engine"
        kinds = world.all_gather_object(kind if inside is None else "inside", "looking at the target")
        within = "inside" in kinds
        with world.phase("beginning a refit"):
            if within and kinds[world.rank] in ("other", "engine"):
                raise ConfigError(
                    f"target is a {type(target).__name__} on rank {world.rank}, and a model, or an engine "
                    "within the rank, on others: pass that, or None on ranks that have nothing of it"
                )
            alone = kinds[0] == "engine" and not getattr(driver, "in_process", False)
            if kinds[world.rank] == "engine" and world.rank and not alone:
                raise ConfigError(
                    f"target is an engine on rank {world.rank}, whose workers are other processes: pass one "
                    "on rank 0 only, and None on the others"
                )
        if within:
            self._way = WithinRanks(inside, driver, settings.strict, world)
            self._meet()  # what an engine cannot take is told before anything else is done
        else:
            image = self._look().image
            address = target if isinstance(target, str) and driver is None else None
            self._way = WorkerProcesses(image, address, driver, settings, world)
        self.address = self._way.address

    def __enter__(self) -> Refitter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._close(kind is None)

    def push(self) -> PushReport:
        """Bring the target to the weights as they are now, as a version of its own; collective.

        The fp32 masters of a model as target follow. Raises, the same on every rank: PeerError, naming it, if
        a worker died or does not answer, or an engine's call failed; ConversionError if an engine's loader
        cannot be followed; VerifyError, naming worker and tensors, if what a worker read back is not what was
        sent. The target is of no version then until the next push, which goes on with those that are there.
        """
        world, way = self._world, self._way
        if way is None:
            raise ConfigError("this refit is closed: call zerostart.refit again")
        phases: dict[str, float] = {}
        with PeakMeter(default_device()) as meter, _timed(phases, "total"):
            with world.phase("pushing weights"):
                with _timed(phases, "plan"):
                    ready, takers = self._meet()
                with _timed(phases, "move"), world.phase("moving weights"):
                    self._sums.begin()
                    moved = way.move(ready, self._sums)
                expected = self._sums.summed(world)
            sums = [[expected[number] for number in numbers] for numbers in takers.numbers]
            self.version += 1
            with _timed(phases, "fill"):
                way.serve(self.version, sums)
        figures = world.all_gather_object(
            (phases, meter.host_bytes, meter.device_bytes or 0), "figures of a push"
        )
        workers = tuple(
            WorkerReport(name, self.version, wanted, digest_of(found))
            for name, wanted, found in zip(takers.names, takers.wanted, sums, strict=True)
            if name is not None
        )
        return PushReport(
            version=self.version,
            transport=way.name,
            phases={key: max(each[0][key] for each in figures) for key in phases},
            owned_bytes=ready.image.layout.total_size,
            moved_bytes=moved,
            wanted_bytes=sum(takers.wanted),
            peak_host_bytes=max(each[1] for each in figures),
            peak_device_bytes=max(each[2] for each in figures),
            workers=workers,
            untaken=takers.untaken,
        )

    def close(self) -> None:
        """Tell the workers that no version comes any more, and release everything."""
        self._close(True)

    def _close(self, is_over: bool) -> None:
        way, self._way = self._way, None
        if way is not None:
            way.close(is_over)

    def _look(self, known: Mapping[str, Entry] | None = None) -> ModelWrites:
        def fit(entries: Sequence[Entry]) -> Sequence[Entry]:
            return fit_entries(entries, known or {}, self._settings.strict)

        ready = prepare_model(self._model, self._settings, self._world, self._image, fit)
        self._image = ready.image
        return ready

    def _meet(self) -> tuple[ModelWrites, Takers]:
        """Look at both sides, and agree on who takes what; collective."""
        assert self._way is not None, "not closed"
        ready = self._look(self._way.look())
        takers = self._way.meet(ready)
        if takers is not self._takers:
            self._takers, self._sums = takers, SetSums(ready.image, takers.sets)
        return ready, takers


class WorkerProcesses:
    """The way of a push to workers in processes of their own on this machine: an image in shared memory.

    Trainer ranks write their elements to their places in it, and workers read theirs out of it.
    """

    name = "shared_memory"

    def __init__(
        self, image: Image, target: str | None, driver: Driver | None, settings: RefitSettings, world: World
    ) -> None:
        """Collective. ``driver`` tells an engine that has the workers; only that of rank 0 does."""
        self._image, self._settings, self._world = image, settings, world
        self._driver = driver if world.rank == 0 else None
        self._server: WorkerServer | None = None
        self._shared: SharedImage | None = None
        self._expected = 0
        try:
            self.address = world.broadcast_object(lambda: self._listen(target), "listening for workers")
            with world.phase("mapping the image"):
                self._shared = SharedImage(image, self._fetch_memory())
            world.broadcast_slow(self._join, "having the engine connect")
        except BaseException:
            self.close(False)
            raise
        self._takers: Takers | None = None
        self._is_first = True
        #: Connections of the workers that all ranks know.
        self._told: list[Channel] = []

    def look(self) -> Mapping[str, Entry]:
        """Return nothing: a loader takes what comes."""
        return {}

    def meet(self, ready: ModelWrites) -> Takers:
        """Wait for the workers, and agree on who takes what; collective."""
        with self._world.phase("comparing the model"):
            if ready.image is not self._image:
                raise ConfigError(
                    "the model's tensors have changed since zerostart.refit was called: call it again"
                )
        takers = self._world.broadcast_slow(self._find_workers, "looking for workers")
        self._takers = takers or self._takers
        assert self._takers is not None, "sent at first"
        return self._takers

    def move(self, ready: ModelWrites, sums: SetSums) -> int:
        """Write this rank's elements into the image; return the bytes that all ranks write."""
        assert self._shared is not None, "not closed"
        write_out(ready.plan, ready.storages, self._shared.part, push_threads(), sums.add_rows)
        return ready.image.layout.total_size

    def serve(self, version: int, sums: Sequence[Sequence[Sums]]) -> None:
        """Have the workers serve the version; collective."""
        self._world.broadcast_slow(lambda: self._serve(version, sums), "having the workers serve")

    def close(self, is_over: bool) -> None:
        """End the connections with the workers."""
        if self._driver is not None:
            self._driver.leave()
        if self._server is not None:
            self._server.close(is_over)
        if self._shared is not None:
            self._shared.close()
        self._driver = self._server = self._shared = None

    def _fetch_memory(self) -> int:
        """Get the descriptor of the image from rank 0."""
        deadline = time.monotonic() + self._settings.timeout
        try:
            channel = connect(socket_path(self.address), min(deadline, time.monotonic() + 10))
        except PeerError as error:
            raise ConfigError(
                f"rank {self._world.rank} cannot reach rank 0 at {self.address}, which is for one machine: "
                "use zerostart.weight_source across machines, and the engine's own weight transfer"
            ) from error
        channel.send("rank", {}, deadline=deadline)
        descriptor = channel.receive("image", deadline=deadline).descriptor
        channel.close()
        return descriptor

    # On rank 0.

    def _listen(self, target: str | None) -> str:
        path = None if target is None else socket_path(target)
        self._server = WorkerServer(path, self._image, self._settings.timeout, self._settings.strict)
        return f"unix://{self._server.path}"

    def _join(self) -> None:
        driver, server, timeout = self._driver, self._server, self._settings.timeout
        if driver is None or server is None:
            return
        self._expected = driver.workers
        call = _Call(lambda: driver.join(self.address, timeout), "the engine's workers could not connect")
        server.wait_for(driver.workers, call.check)
        call.wait(timeout)

    def _find_workers(self) -> Takers | None:
        """Return the workers of this push; None if they are those of the last."""
        server, expected = self._server, self._expected
        assert server is not None, "rank 0 has it"
        count = max(1, expected, (self._settings.workers or 1) if self._is_first else 1)
        if not expected:
            server.wait_for(count)
        self._is_first = False
        server.settle()
        if len(server.workers) < expected:
            # Versions of one engine would differ: those that are there would have the new one alone.
            raise PeerError(
                f"{len(server.workers)} of the engine's {expected} workers are connected; nothing was "
                "pushed: call zerostart.refit again, which has the engine connect"
            )
        workers = server.workers.values()
        channels = [worker.channel for worker in workers]
        if channels == self._told:
            return None
        self._told = channels
        return Takers.of(
            self._image, [*server.workers], [w.wants for w in workers], [w.sets for w in workers]
        )

    def _serve(self, version: int, sums: Sequence[Sequence[Sums]]) -> None:
        server, driver, timeout = self._server, self._driver, self._settings.timeout
        assert server is not None, "rank 0 has it"
        by_name = dict(zip(server.workers, sums, strict=True))
        if driver is None:
            server.serve(version, by_name, lambda: None)
            return
        call = _Call(lambda: driver.follow(version), f"the engine did not take version {version}")
        server.serve(version, by_name, call.check)
        call.what = f"all workers have version {version}, but the engine's own call failed"
        call.wait(timeout)
        if (served := getattr(driver, "served", None)) is not None:
            _Call(lambda: served(version), call.what).wait(timeout)


class _Call:
    """An engine's own call, in a thread; it may raise anything, and take for ever."""

    def __init__(self, work: Callable[[], object], what: str) -> None:
        self.what, self._work = what, work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="zerostart-refit-engine", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise PeerError if the call has failed."""
        if self._error is not None:
            raise PeerError(f"{self.what}: {self._error}")

    def wait(self, timeout: float) -> None:
        """Return when the call has ended; raise PeerError."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise PeerError(f"{self.what}: it has not ended in {timeout:.0f} s")
        self.check()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # raised by check()
            self._error = error


def _inside(target: object, driver: Driver | None) -> nn.Module | Receiver | None:
    """Return what lives in this very rank: a model, or the worker of an engine; None for any other target."""
    if isinstance(target, Receiver):
        return target
    if driver is None and isinstance(target, nn.Module):
        # An engine's module has a loader of its own; a model to train has none.
        return Receiver(target) if callable(getattr(target, "load_weights", None)) else target
    worker: Callable[[], Receiver | None] | None = getattr(driver, "worker", None)
    return None if worker is None else worker()


def _compare(settings: RefitSettings, world: World) -> None:
    """Raise ConfigError if ranks were given different arguments; collective."""
    ranks = world.all_gather_object(asdict(settings), "comparing the arguments")
    for rank, given in enumerate(ranks):
        for name, first in ranks[0].items():
            if given[name] != first:
                raise ConfigError(
                    f"{name}={first!r} on rank 0, but {name}={given[name]!r} on rank {rank}: call "
                    "zerostart.refit with the same arguments on every rank"
                )


@contextmanager
def _timed(phases: dict[str, float], name: str) -> Iterator[None]:
    """Note the seconds of a body under its name."""
    begun = time.perf_counter()
    yield
    phases[name] = time.perf_counter() - begun


def _driver_of(target: object) -> Driver | None:
    """Return the driver of ``target``; None for what is no engine."""
    if target is None or isinstance(target, Driver):
        return target
    from zerostart.refit import sglang, vllm

    # vLLM last: its server has no route that tells it from others, and SGLang asks an address what it is.
    return sglang.driver_of(target) or vllm.driver_of(target)
