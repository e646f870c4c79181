"""The trainer's side of the connections with workers, on rank 0: who is there, wants what, is told what.

Workers may come at any time, before the first push and after a death; what they take of the image is worked
out meanwhile, in threads of their connections. All else happens within a push, in the thread that calls it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

from zerostart.checkpoint.channel import HANDSHAKE, PROTOCOL, Address, Channel, Message, key_of
from zerostart.checkpoint.strict_json import JsonObject
from zerostart.errors import (
    CheckpointError,
    ConfigError,
    ConversionError,
    PeerError,
    VerifyError,
    ZerostartError,
)
from zerostart.state.refitting.image import Image
from zerostart.state.refitting.sums import Sums
from zerostart.state.refitting.transports.base import WorkerInfo
from zerostart.transfer.planning.runs import Runs

logger = logging.getLogger("zerostart")
#: Connections whose owners have not said who they are, at a time.
MOST_STRANGERS = 256
#: Seconds in which a worker that could not be sent to any more says that it is there all the same. The
#: connection of one that has died ends a moment after that by which it was sent to.
DYING = 5.0
#: What a worker says in a push, which may come when that has been given up.
IN_A_PUSH = ("prepared", "failed", "serving")


@dataclass
class Worker:
    """A worker that is connected."""

    name: str
    host: str
    pid: int
    #: What its parameters have.
    version: int | None
    channel: Channel
    wants: Runs
    #: Of whose elements it sums up digests.
    sets: tuple[Runs, ...]
    #: See ``WorkerInfo``.
    device: tuple[str, str]
    #: Whether it has to be told how the transport is opened.
    fresh: bool = True
    #: How it was told so.
    opened: JsonObject | None = None
    fingerprint: str = ""
    #: Seconds from the decision until it served the version.
    seconds: float = 0.0


@dataclass
class Session:
    """Listens for workers, and speaks with those that are there."""

    address: Address
    secret: str | None
    image: Image
    timeout: float
    #: Where a decision is written down before anybody is told of it.
    decision: Path
    #: Whether a worker with parameters that nothing fills is refused.
    strict: bool = True
    workers: dict[str, Worker] = field(default_factory=dict)
    #: Called while a worker is waited for; what it raises ends the push.
    check: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        """Raises ConfigError where nobody can listen there, or others could connect without a secret."""
        self._key = key_of(self.secret, self.address)
        self._changed = threading.Condition()
        self._arrived: dict[str, Worker] = {}
        self._refused: dict[str, str] = {}
        self._strangers = 0
        self._closing = threading.Event()
        #: Held while a decision is written down and told: all of a worker's connection is then told it.
        self._deciding = threading.Lock()
        try:
            if isinstance(self.address.place, str):
                _remove_socket(self.address.place)
            self._listener = Listener(self.address.place, self.address.family, backlog=128)
        except OSError as error:
            raise ConfigError(f"nobody can listen at {self.address}: {error.strerror or error}") from error
        if isinstance(self.address.place, str):
            Path(self.address.place).chmod(0o600)
        # Port 0 is any that is free.
        self.address = Address(self.address.family, self._listener.address)
        self._accepting = threading.Thread(target=self._accept, name="zerostart-refit", daemon=True)
        self._accepting.start()

    def close(self, over: bool = True) -> None:
        """End all connections; raises nothing.

        Workers are told that it is ``over``; otherwise they wait for another trainer.
        """
        self._closing.set()
        with contextlib.suppress(OSError):
            # To close it wakes nobody who waits at it, and it keeps its port until then.
            Client(self.address.place, self.address.family).close()
        self._accepting.join(1)
        with contextlib.suppress(OSError):
            self._listener.close()
        with self._deciding:  # a push in the background may be about to tell some of them
            pass
        with self._changed:
            everybody = [*self.workers.values(), *self._arrived.values()]
            self.workers, self._arrived = {}, {}
        for worker in everybody:
            with contextlib.suppress(PeerError):
                if over:
                    worker.channel.send("close")
            worker.channel.close()

    # Who is there.

    def wait_for(self, count: int, timeout: float, since_settled: bool = False) -> None:
        """Return when ``count`` workers are there, or have come ``since_settled``.

        Raises PeerError after ``timeout`` seconds, and ConversionError where one cannot take the image.
        """
        until = time.monotonic() + timeout

        def there() -> list[str]:
            return sorted(self._arrived if since_settled else self.workers.keys() | self._arrived.keys())

        with self._changed:
            while not self._changed.wait_for(
                lambda: self._refused or len(there()) >= count,
                min(0.5, max(0.0, until - time.monotonic())),
            ):
                self.check()  # the engine may have refused to have its workers connect
                if time.monotonic() < until:
                    continue
                names = there()
                raise PeerError(
                    f"{len(names)} of {count} workers have connected with {self.address} within "
                    f"{timeout:.0f} s" + (f": {', '.join(names)}" if names else "")
                )
        self.check_refused()

    def check_refused(self) -> None:
        """Raise ConversionError where a worker cannot take the image."""
        with self._changed:
            refused, self._refused = self._refused, {}
        if refused:
            name, why = next(iter(refused.items()))
            more = f" (and {len(refused) - 1} more workers)" if len(refused) > 1 else ""
            raise ConversionError(f"worker {name} cannot take these weights{more}: {why}")

    def settle(self) -> list[str]:
        """Take in those who have come, and drop those who have gone; gives the names of the latter."""
        with self._changed:
            arrived, self._arrived = self._arrived, {}
        for name, worker in arrived.items():
            if (before := self.workers.pop(name, None)) is not None:
                logger.warning(
                    "worker %s has come back with %s: the next push brings it up to date",
                    *(name, "no version" if worker.version is None else f"version {worker.version}"),
                )
                before.channel.close()
            self.workers[name] = worker
        gone = [name for name, worker in self.workers.items() if not self._is_there(worker)]
        for name in gone:
            self.drop(name)
        return gone

    @staticmethod
    def _is_there(worker: Worker) -> bool:
        """Whether its connection lives. What it has still said to an earlier push is forgotten."""
        try:
            while worker.channel.waiting():
                worker.channel.receive(*IN_A_PUSH)
        except PeerError:
            return False
        return not worker.channel.closed

    @staticmethod
    def _gives_up(worker: Worker, version: int, until: float) -> bool:
        """Whether it says before ``until`` that it does without ``version``."""
        try:
            while worker.channel.waiting(max(0.0, until - time.monotonic())):
                answer = worker.channel.receive(*IN_A_PUSH)
                if answer.kind == "failed" and answer.body.get("version") == version:
                    return True
        except PeerError:
            pass
        return False

    def drop(self, name: str) -> None:
        """Go on without a worker."""
        worker = self.workers.pop(name)
        worker.channel.close()
        logger.warning("worker %s is gone; pushes go on without it until it comes back", name)

    def infos(self) -> list[WorkerInfo]:
        """The workers as transports want them."""
        return [
            WorkerInfo(number, worker.name, worker.host, worker.wants, worker.device)
            for number, worker in enumerate(self.workers.values())
        ]

    def expect(self, image: Image) -> None:
        """Workers that come are told of ``image`` from now on."""
        with self._changed:
            self.image = image

    def renew(self) -> None:
        """Have all workers plan for the image where it is another; raises ConversionError and PeerError."""
        image, lost = self.image, []
        asked = []
        for worker in self._outdated():
            try:
                worker.channel.send("image", {"strict": self.strict}, image.to_bytes())
                asked.append(worker)
            except PeerError as error:
                lost.append(error)
        # All of them, whatever one says: an answer that is not heard would be taken for one to what comes.
        until = time.monotonic() + self.timeout
        for worker in asked:
            try:
                worker.wants, worker.sets, worker.device = self._wants(worker.name, worker.channel, until)
                worker.fresh, worker.fingerprint = True, image.fingerprint
            except ConversionError:
                worker.fingerprint = ""  # raised below
            except PeerError as error:
                lost.append(error)
                worker.channel.close()
        self.check_refused()
        if lost:
            raise lost[0]

    def _outdated(self) -> list[Worker]:
        return [w for w in self.workers.values() if w.fingerprint != self.image.fingerprint]

    # A push.

    def prepare(self, version: int, opened: Mapping[str, JsonObject], transport: str) -> None:
        """Tell all workers to get ready."""
        for worker in self.workers.values():
            body: JsonObject = {"version": version, "decision": str(self.decision)}
            # Opened anew, perhaps, since another worker came or went.
            parameters = opened.get(worker.name, {})
            if worker.fresh or worker.opened != parameters:
                body["open"] = {"transport": transport, "parameters": parameters}
                worker.opened = parameters
            worker.channel.send("prepare", body)
            worker.fresh = False

    def prepared(self, version: int) -> None:
        """Return when all workers have the bytes of ``version``; raises what one of them failed with."""
        until = time.monotonic() + self.timeout
        silent: list[str] = []
        for worker in self.workers.values():
            try:
                answer = self._answer(worker, version, until, "prepared", "failed")
            except PeerError:
                if time.monotonic() < until:
                    raise
                silent.append(worker.name)  # perhaps with others, of which each push would find one
                continue
            if answer.kind == "failed":
                worker.fresh = True
                raise PeerError(
                    f"worker {worker.name} cannot take version {version}: {answer.body.get('why')}"
                )
        if silent:
            who = f"worker {silent[0]} has" if len(silent) == 1 else f"workers {', '.join(silent)} have"
            raise PeerError(f"{who} not answered within {self.timeout:.0f} s")

    def abort(self, version: int, why: str, lost: Sequence[str] | None = None) -> None:
        """Tell all workers that ``version`` does not come; raises nothing.

        Where one of ``lost`` (none: of all) could not be sent to, those go on that say that they are there:
        the next push neither tells of another once more nor waits for it.
        """
        for worker in [*self.workers.values()]:
            try:
                worker.channel.send("abort", {"version": version, "why": why[:4000]})
            except PeerError:
                self.drop(worker.name)
            worker.fresh = True
        if lost is None:
            return
        until = time.monotonic() + DYING
        for name in [name for name in self.workers if name in lost or not lost]:
            if not self._gives_up(self.workers[name], version, until):
                self.drop(name)

    def _answer(self, worker: Worker, version: int, until: float, *kinds: str) -> Message:
        """What a worker says about ``version``. Raises PeerError where it does not, and as ``check``.

        ``until`` is the same for all workers: those that have stopped take the time of one.
        """
        while True:
            while not worker.channel.waiting(min(0.5, max(0.0, until - time.monotonic()))):
                if time.monotonic() >= until:
                    break
                self.check()
            if not worker.channel.waiting():
                worker.channel.close()  # so that the next push goes on without it
                raise PeerError(f"worker {worker.name} has not answered within {self.timeout:.0f} s")
            answer = worker.channel.receive(*IN_A_PUSH, timeout=0.0)
            # It may have answered to a version that was given up since.
            if answer.body.get("version") == version and answer.kind in kinds:
                return answer

    def decide(self, version: int, sums: Mapping[str, Sequence[Sums]]) -> None:
        """Write down that ``version`` is to be served, then tell the workers."""
        each = {name: list(found) for name, found in sums.items()}

        def tell(worker: Worker) -> None:
            # One that is lost now looks at what was written down.
            with contextlib.suppress(PeerError):
                worker.channel.send("commit", {"version": version, "sums": each[worker.name]})

        # At once: sums of many tensors are long, and one that takes nothing is not to hold up the others.
        telling = [
            threading.Thread(target=tell, args=(worker,), daemon=True) for worker in self.workers.values()
        ]
        with self._deciding:
            if self._closing.is_set():
                raise PeerError("the refit was closed before the version was decided")
            part = self.decision.with_suffix(".part")
            part.write_text(json.dumps({"version": version, "sums": each}))
            part.chmod(0o600)
            part.replace(self.decision)
            for thread in telling:
                thread.start()
            for thread in telling:
                thread.join()

    def served(self, version: int) -> None:
        """Return when all workers serve ``version``.

        Raises PeerError, naming those that are lost, and VerifyError where what one read back differs.
        """
        begun = time.monotonic()
        lost: list[str] = []
        failed: list[str] = []
        for worker in [*self.workers.values()]:
            try:
                answer = self._answer(worker, version, begun + self.timeout, "serving", "failed")
            except PeerError:
                self.drop(worker.name)
                lost.append(worker.name)
                continue
            worker.seconds = time.monotonic() - begun
            if answer.kind == "failed":
                worker.version, worker.fresh = None, True
                failed.append(f"worker {worker.name}: {answer.body.get('why')}")
            else:
                worker.version = version
        serving = [worker.name for worker in self.workers.values() if worker.version == version]
        rest = f"version {version} is served by {', '.join(serving) or 'nobody'}"
        if failed:
            raise VerifyError(f"{'; '.join(failed)}. It serves no version now; {rest}; push again")
        if lost:
            raise PeerError(
                f"{', '.join(lost)} died, or stopped answering, after version {version} was decided; {rest}. "
                "The next push goes on without, or with it where it has come back"
            )

    # Arrivals, in threads of their own.

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection = self._listener.accept()
            except (OSError, EOFError):
                if self._closing.is_set():
                    return
                time.sleep(0.05)
                continue
            # Others wait for their turn: to be turned away would end a worker.
            while self._strangers >= MOST_STRANGERS and not self._closing.is_set():
                time.sleep(0.01)
            if self._closing.is_set():
                connection.close()
                return
            with self._changed:
                self._strangers += 1
            threading.Thread(
                target=self._welcome, args=(connection,), name="zerostart-refit-hello", daemon=True
            ).start()

    def _welcome(self, connection: Connection) -> None:
        channel = Channel(connection, "somebody who has connected", self.timeout)
        try:
            try:
                channel.prove(self._key, asking=True)
                hello = channel.receive("hello", timeout=HANDSHAKE)
            finally:
                with self._changed:
                    self._strangers -= 1
            self._greet(channel, hello)
        except ZerostartError as error:
            channel.close()
            logger.warning("a worker could not join: %s", error)

    def _greet(self, channel: Channel, hello: Message) -> None:
        body = hello.body
        name, version = str(body.get("name"))[:200], body.get("version")
        channel.who = f"worker {name}"
        if body.get("protocol") != PROTOCOL:
            why = f"it speaks protocol {body.get('protocol')}, and the trainer {PROTOCOL}"
            why += ": install the same zerostart on both sides"
            channel.send("refused", {"why": why})
            raise ConfigError(f"worker {name}: {why}")
        with self._changed:
            image = self.image
            before = self._arrived.get(name) or self.workers.get(name)
        if before is not None and not before.channel.closed and not before.channel.waiting():
            why = f"another worker is connected under the name {name}: give each a name of its own"
            channel.send("refused", {"why": why})
            raise ConfigError(why)
        channel.send("image", {"strict": self.strict}, image.to_bytes())
        try:
            wants, sets, device = self._wants(name, channel, time.monotonic() + self.timeout)
        except ConversionError:
            with self._changed:
                self._changed.notify_all()
            raise
        worker = Worker(
            name,
            str(body.get("host")),
            int(body.get("pid", 0)),
            version if isinstance(version, int) else None,
            channel,
            wants,
            sets,
            device,
            fingerprint=image.fingerprint,
        )
        with self._changed:
            if self._closing.is_set():
                channel.close()
            self._arrived[name] = worker
            self._changed.notify_all()

    def _wants(
        self, name: str, channel: Channel, until: float
    ) -> tuple[Runs, tuple[Runs, ...], tuple[str, str]]:
        answer = None
        # It may have answered to a version that was given up since.
        while answer is None or answer.kind in IN_A_PUSH:
            left = max(0.0, until - time.monotonic())
            answer = channel.receive("wants", "refused", *IN_A_PUSH, timeout=left)
        if answer.kind == "refused":
            with self._changed:
                self._refused[name] = str(answer.body.get("why"))
            raise ConversionError(f"{name}: {answer.body.get('why')}")
        try:
            if not answer.parts:
                raise CheckpointError("no runs")
            found = [Runs.from_bytes(part) for part in answer.parts]
            if any(runs.end > self.image.nbytes for runs in found):
                raise CheckpointError("bytes behind the end of the image")
        except CheckpointError as error:
            channel.close()
            raise PeerError(f"worker {name} wants what no image has: {error}") from error
        kind, own = (str(answer.body.get(key, "")) for key in ("device", "device_id"))
        return found[0], tuple(found[1:]), (kind or "cpu", own)


def _remove_socket(path: str) -> None:
    """Remove a socket that nobody listens at any more."""
    place = Path(path)
    if not place.exists():
        return
    if not place.is_socket():
        raise ConfigError(f"{path} is there already, and is no socket; choose another address")
    with socket.socket(socket.AF_UNIX) as trial:
        try:
            trial.connect(path)
        except ConnectionRefusedError:
            place.unlink()
            return
    raise ConfigError(f"somebody listens at unix://{path} already; choose another address")
