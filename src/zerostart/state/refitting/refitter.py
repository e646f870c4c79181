"""Pushing the weights of a live model to the workers of an engine: what all trainer ranks do together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType

from torch import nn

from zerostart.checkpoint.channel import Address
from zerostart.checkpoint.strict_json import JsonObject
from zerostart.distributed.world import World, current_world, default_device
from zerostart.errors import ConfigError, PeerError
from zerostart.state.refitting.image import Image
from zerostart.state.refitting.place import Place
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
from zerostart.state.refitting.session import Session
from zerostart.state.refitting.sums import SetSums, digest_of
from zerostart.state.refitting.targets import Engines
from zerostart.state.refitting.transports.base import Transport, WorkerInfo, WorkerLost, transport_kind
from zerostart.transfer.meter import PeakMeter
from zerostart.transfer.planning.runs import Runs
from zerostart.transfer.tuning import push_threads
from zerostart.transfer.writing import write_out


@dataclass(frozen=True)
class _Takers:
    """The workers of a push, as all ranks know them."""

    infos: list[WorkerInfo] = field(default_factory=list)
    #: Each set of elements that any worker sums up, once.
    sets: list[Runs] = field(default_factory=list)
    #: By worker the numbers of its sets.
    numbers: dict[str, list[int]] = field(default_factory=dict)
    #: Tensors that none of them takes anything of.
    untaken: tuple[str, ...] = ()


class Refitter:
    """Pushes versions of a model's weights to an engine's workers; every rank has one.

    A context manager; leaving it is ``close``, but where an error leaves it workers go on waiting for another
    trainer at the same address.
    """

    def __init__(
        self,
        model: nn.Module,
        target: str | Engines | None,
        settings: RefitSettings,
        world: World | None = None,
    ) -> None:
        """Collective. ``target`` is where to listen for workers, or what has workers that are to be told.

        Raises as ``zerostart.refit``.
        """
        self.version = 0
        self._model = model
        self._settings = settings
        self._world = world = world or current_world()
        self._engines = target if isinstance(target, Engines) else None
        self._driver = None if self._engines is None else self._engines.driver
        #: Whether the engine within this rank has to connect anew.
        self._left = False
        self._place: Place | None = None
        self._session: Session | None = None
        self._transport: Transport | None = None
        self._sums: SetSums | None = None
        self._opened: Mapping[str, JsonObject] | None = None
        self._takers = _Takers()
        self._told: object = None
        self._pushing: Pushing | None = None
        self._image: Image | None = None
        self._met = False
        #: The version that the transport has brought to all workers, and how many pushes ago all was sent.
        self._base: int | None = None
        self._deltas = 0
        try:
            with world.phase("beginning a refit"):
                with world.phase("arguments"):
                    settings.check()
                    kind = transport_kind(settings.transport or "shared_memory")
                self._image = prepared(self._model, self._settings, world, self._image).image
                made = world.broadcast_object(lambda: self._begin(target), "listening for workers")
                self.address, folder = made
                options = {
                    "folder": folder,
                    "timeout": settings.timeout,
                    "deltas": settings.full_every > 1,
                }
                self._transport = kind.outgoing(world, options)
                self._join()
        except BaseException:
            self._release()
            raise

    def __enter__(self) -> Refitter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._release(over=False)

    def push(self, wait: bool = True) -> PushReport | Pushing:
        """Bring all workers to the weights as they are now, as a version of its own; collective.

        With ``wait=False`` it returns when the weights have left the model, which may be stepped then, and
        gives a handle with ``wait()`` and ``done()``, both collective.

        Raises, the same on every rank: PeerError, naming it, where a worker died, cannot take the version, or
        does not answer; ConversionError where an engine's loader cannot be followed; VerifyError, naming
        worker and tensors, where what a worker read back is not what was sent. Workers serve the version
        before, or where the message says so the new one; the next push goes on with those that are there.
        """
        world, version = self._world, self.version + 1
        if self._transport is None:
            raise ConfigError("this refit is closed: call zerostart.refit again")
        if self._pushing is not None:
            pushing, self._pushing = self._pushing, None
            # What it failed with has been told where somebody has waited for it.
            if not pushing.settled:
                pushing.wait()
        phases: dict[str, float] = {}
        begun = time.perf_counter()
        self.version = version
        base: int | None = None
        with PeakMeter(default_device()) as meter:
            try:
                with world.phase("pushing weights"):
                    with timed(phases, "plan"):
                        ready = prepared(self._model, self._settings, world, self._image)
                        self._meet_workers(ready.image, version)
                        base = self._open(ready, version)
                    with timed(phases, "write"), world.phase("writing the weights"):
                        sums = self._write(ready, version, base)
            except BaseException as error:
                self._abort(version, error)
                if isinstance(error, WorkerLost):  # on all ranks, which are there
                    raise PeerError(f"{error}; workers serve the version before") from error
                raise
        try:
            figures = world.all_gather_object(
                (phases, self._transport.carried(), meter.host_bytes, meter.device_bytes or 0),
                "figures of a push",
            )
        except BaseException as error:
            self._abort(version, error)  # the workers wait for a decision
            raise
        self._base, self._deltas = version, 0 if base is None else self._deltas + 1
        owned, carried = ready.image.layout.total_size, [each[1] for each in figures]
        report = PushReport(
            version,
            base,
            f"{self._transport.name}{self._transport.note}",
            {key: max(each[0][key] for each in figures) for key in phases},
            owned,
            owned if base is None else sum(each.changed for each in carried),
            sum(each.moved for each in carried),
            sum(info.wants.nbytes for info in self._takers.infos),
            max(each.kept for each in carried),
            max(each[2] for each in figures),
            max(each[3] for each in figures),
            (),
            self._takers.untaken,
        )
        pushing = Pushing(world, lambda: self._complete(report, sums, begun), self._end_own)
        if not wait:
            self._pushing = pushing
            return pushing
        return pushing.wait()

    def close(self) -> None:
        """Tell the workers that no version comes any more, and release everything; collective.

        A push that is under way is waited for; raises what that failed with.
        """
        pushing, self._pushing = self._pushing, None
        try:
            if pushing is not None and not pushing.settled:
                pushing.wait()
        finally:
            self._release()

    def _release(self, over: bool = True) -> None:
        if self._driver is not None:
            self._driver.leave()
        if self._session is not None:
            self._session.close(over)
        if self._transport is not None:
            self._transport.close()
        if self._place is not None:
            self._place.close()
        self._session = self._transport = self._place = None

    # Rank 0.

    def _begin(self, target: object) -> tuple[str, str]:
        """Listen for workers; gives the address, and a folder of this job."""
        assert self._image is not None, "looked at before"
        self._place = Place()
        text = target if isinstance(target, str) and target else f"unix://{self._place.path / 'workers'}"
        decision = self._place.path / "decision.json"
        settings = self._settings
        self._session = Session(
            Address.of(text), settings.secret, self._image, settings.timeout, decision, settings.strict
        )
        return str(self._session.address), str(self._place.path)

    def _wait_for_engine(self, join: Callable[[], None], workers: int) -> None:
        """Have the engine connect, and wait for its workers."""
        session = self._session
        assert session is not None, "rank 0 has it"
        with _beside(join) as check:
            session.check = check
            session.wait_for(workers, self._settings.timeout)
        session.check = _nothing

    def _settle(self, image: Image, back: int) -> tuple[object, _Takers | None]:
        """The workers of this push, ``back`` of them anew; the second is None where all ranks know them."""
        session = self._session
        assert session is not None, "rank 0 has it"
        session.check_refused()
        engines = self._engines
        expected = self._settings.workers or (1 if engines is None else engines.workers)
        if not self._met:
            session.wait_for(expected, self._settings.timeout)
            self._met = True
        session.wait_for(back, self._settings.timeout, since_settled=True)
        gone = session.settle()
        if gone:
            raise PeerError(
                f"{', '.join(gone)} died, or stopped answering, since the last push; nothing was pushed. "
                f"The next "
                "push goes on without, or with it where it has come back"
            )
        if not session.workers:
            session.wait_for(1, self._settings.timeout)
            session.settle()
            if not session.workers:
                raise PeerError("the workers that had connected are gone; nothing was pushed: push again")
        there, needed = len(session.workers), 0 if engines is None else expected
        if there < needed:
            # Versions of one engine would differ: those that are there would have the new one alone.
            raise PeerError(
                f"{there} of the engine's {needed} workers are connected; nothing was pushed: call "
                "zerostart.refit again, which has the engine connect"
            )
        session.renew()
        infos = session.infos()
        told = image.fingerprint, [(info.name, info.wants.to_bytes()) for info in infos]
        fresh = any(worker.fresh for worker in session.workers.values())
        if told == self._told and not fresh:
            return None, None
        self._told = told
        sets: dict[bytes, tuple[int, Runs]] = {}
        numbers: dict[str, list[int]] = {}
        for worker in session.workers.values():
            # Replicas want the same, which is summed up once.
            each = [sets.setdefault(runs.to_bytes(), (len(sets), runs))[0] for runs in worker.sets]
            numbers[worker.name] = each
        return None, _Takers(
            infos,
            [runs for _, runs in sets.values()],
            numbers,
            untaken(image, [info.wants for info in infos]),
        )

    def _complete(
        self, report: PushReport, sums: list[dict[str, tuple[int, ...]]], begun: float
    ) -> PushReport:
        """Have the workers serve what was written; on rank 0, perhaps in a thread of its own."""
        session, version = self._session, report.version
        assert session is not None, "rank 0 has it"
        started = time.perf_counter()
        try:
            session.prepared(version)
            agreed = time.perf_counter()
            numbers = self._takers.numbers
            # What fails in it fails before the decision has its name.
            session.decide(version, {name: [sums[n] for n in each] for name, each in numbers.items()})
        except BaseException as error:
            session.abort(version, str(error))
            self._end_following()
            raise
        try:
            # From here on each worker answers for itself: that the engine's call has failed for one says
            # nothing of the others.
            session.check = _nothing
            session.served(version)
        finally:
            self._end_following()
        if self._engines is not None and not self._engines.one_each:
            self._say_served(version)
        if self._following_error is not None:
            raise PeerError(
                f"all workers have version {version}, but the engine's own call failed: "
                f"{self._following_error}"
            )
        ended = time.perf_counter()
        phases = {**report.phases, "agree": agreed - started, "fill": ended - agreed, "total": ended - begun}
        workers = tuple(
            WorkerReport(
                worker.name,
                version,
                worker.wants.nbytes,
                worker.seconds,
                digest_of([sums[n] for n in numbers[worker.name]]),
            )
            for worker in session.workers.values()
        )
        return replace(report, phases=phases, workers=workers)

    # Every rank.

    def _join(self) -> None:
        """Have the engine connect, or each rank's own; collective."""
        engines, driver, world = self._engines, self._driver, self._world
        if engines is None:
            return

        def join() -> None:
            assert driver is not None, "where the engine is"
            driver.join(self._how)

        if engines.one_each:
            # Rank 0 takes in those of all ranks meanwhile, in threads of its own.
            with self._own_engines("having the engine within each rank connect"):
                join()
        else:
            world.broadcast_slow(
                lambda: self._wait_for_engine(join, engines.workers), "having the engine connect"
            )

    @property
    def _how(self) -> JsonObject:
        """What workers are told to connect with."""
        return {"address": self.address, "secret": self._settings.secret, "timeout": self._settings.timeout}

    def _meet_workers(self, image: Image, version: int) -> None:
        if self._session is not None:
            self._session.expect(image)
        back = self._come_back() if self._engines is not None and self._engines.one_each else 0
        if image is not self._image or self._opened is None:
            # An engine's workers listen in its own call alone, and may be asked about another image.
            self._begin_following(version)
        _, takers = self._world.broadcast_slow(lambda: self._settle(image, back), "looking for workers")
        self._image = image
        if takers is not None:
            self._takers = takers
            self._sums = None
        if self._sums is None:
            self._sums = SetSums(image, self._takers.sets)
            self._opened = None

    def _open(self, ready: Prepared, version: int) -> int | None:
        """Have the transport and the workers ready for ``version``; gives the one that they have whole."""
        transport, world = self._transport, self._world
        assert transport is not None, "not closed"
        base, self._base = self._base, None
        if self._opened is None or self._deltas + 1 >= self._settings.full_every:
            base = None
        if self._opened is None:
            own = Runs.of_writes(ready.plan, ready.image.layout)
            self._opened = transport.open(ready.image, own, self._takers.infos)

        if self._following is None:
            self._begin_following(version)

        def begin() -> None:
            session = self._session
            assert session is not None, "rank 0 has it"
            assert self._opened is not None, "opened above"
            session.prepare(version, self._opened, transport.name)

        world.broadcast_object(begin, "having the workers prepare")
        return base

    def _write(self, ready: Prepared, version: int, base: int | None) -> list[dict[str, tuple[int, ...]]]:
        transport, sums = self._transport, self._sums
        assert transport is not None, "not closed"
        assert sums is not None, "opened before"
        sums.begin()
        writer = transport.writer(version, base)
        write_out(ready.plan, ready.storages, writer, push_threads(), sums.add_rows)
        transport.finish()
        return sums.summed(self._world)

    def _abort(self, version: int, error: BaseException) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._opened = None
        if self._session is not None:
            # No push goes on without a worker of an engine, which does not come back by itself.
            lost = error.workers if isinstance(error, WorkerLost) and self._engines is None else None
            self._session.abort(version, str(error) or type(error).__name__, lost)
        self._end_following()

    # The engine's own call, which has its workers follow.

    _following: threading.Thread | None = None
    _following_error: BaseException | None = None

    def _begin_following(self, version: int) -> None:
        driver, session = self._driver, self._session
        if driver is None:
            return
        self._following_error = None

        def follow() -> None:
            try:
                driver.follow(version)
            except BaseException as error:  # looked at by whoever waits for the workers
                self._following_error = error
                if session is None:
                    # Rank 0 cannot look; it sees that the connection ends, whatever the engine has not said.
                    driver.leave()
                    self._left = True

        def check() -> None:
            if self._following_error is not None:
                raise PeerError(f"the engine did not take version {version}: {self._following_error}")

        if session is not None:
            session.check = check
        self._following = threading.Thread(target=follow, name="zerostart-refit-engine", daemon=True)
        self._following.start()

    def _end_following(self) -> None:
        following, self._following = self._following, None
        if self._session is not None:
            self._session.check = _nothing
        if following is not None:
            following.join(self._settings.timeout)
            if following.is_alive():
                self._following_error = TimeoutError(f"it has not ended in {self._settings.timeout:.0f} s")

    def _say_served(self, version: int) -> None:
        """Have the engine say that it serves ``version``, where it says such a thing."""
        served = getattr(self._driver, "served", None)
        if served is not None and self._following_error is None:
            try:
                served(version)
            except Exception as error:  # an engine's call raises whatever it wants
                self._following_error = error

    def _end_own(self, failed: bool) -> None:
        """End the call of the engine within this rank; collective unless the push has ``failed``."""
        if self._engines is None or not self._engines.one_each:
            return
        self._end_following()
        if not failed:
            self._say_served(self.version)
            with self._own_engines("ending the engines' own calls"):
                if self._following_error is not None:
                    raise PeerError(
                        f"all workers have version {self.version}, but the call of the engine within rank "
                        f"{self._world.rank} failed: {self._following_error}"
                    )

    @contextmanager
    def _own_engines(self, during: str) -> Iterator[None]:
        """A phase in which an engine within a rank may be lost: a PeerError on all ranks, which are there."""
        try:
            with self._world.phase(during):
                try:
                    yield
                except PeerError as error:
                    raise WorkerLost(str(error)) from error
        except WorkerLost as error:
            raise PeerError(str(error)) from error

    def _come_back(self) -> int:
        """Have engines within ranks connect anew where they have left; collective. How many workers come."""
        driver, back = self._driver, 0
        during = "having the engine within each rank connect"
        with self._own_engines(during):
            if driver is not None and self._left:
                driver.join(self._how)
                self._left, back = False, driver.workers
        return sum(self._world.all_gather_object(back, during))


def _nothing() -> None:
    return


@contextmanager
def _beside(work: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Run ``work`` in a thread beside the body, which is given a function that raises what it failed with."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    def check() -> None:
        if failed:
            raise PeerError(f"the engine's workers could not connect: {failed[0]}")

    thread = threading.Thread(target=run, name="zerostart-refit-engine", daemon=True)
    thread.start()
    yield check
    thread.join()
    check()
