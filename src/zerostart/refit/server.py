"""The trainer's side of the connections with workers, on rank 0.

Workers may come at any time; what they take of the image is found out in threads of their connections. All
else happens within a push, in the thread that calls it.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from zerostart.errors import ConfigError, ConversionError, PeerError, VerifyError, ZerostartError
from zerostart.refit.image import Image, Runs, Sums, make_memory
from zerostart.refit.pushes import RefitSettings
from zerostart.refit.wire import PROTOCOL, Channel, Driver, listen

logger = logging.getLogger("zerostart")
#: Seconds within which a process that has connected says what it is.
HELLO_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Worker:
    """A worker that is connected, and the bytes of the image that it takes."""

    name: str
    channel: Channel
    wants: Runs


class WorkerServer:
    """Listens for workers, and speaks with those that are there. Every rank gets the image from it, too."""

    def __init__(
        self, path: Path | None, image: Image, driver: Driver | None, settings: RefitSettings
    ) -> None:
        """Raises ConfigError if nobody can listen at ``path``, and WriteError for want of memory."""
        self._image, self._driver, self._settings = image, driver, settings
        self._count, self._timeout = settings.workers or 1, settings.timeout
        self._changed = threading.Condition()
        self._workers: list[Worker] = []
        self._refused: list[str] = []
        self._is_closing = False
        self._listener, bound = listen(path)
        self.address = f"unix://{bound}"
        # Also at the end of a script that does not close it.
        self._remove = weakref.finalize(self, _remove_socket, os.getpid(), bound, path is None)
        self.descriptor = make_memory(image)
        self._thread = threading.Thread(target=self._accept, name="zerostart-refit", daemon=True)
        self._thread.start()

    def close(self, is_over: bool) -> None:
        """End all connections. Workers are told that it ``is_over``, or wait for another trainer."""
        if self._driver is not None:
            self._driver.leave()
        self._is_closing = True
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._listener.close()
        self._remove()
        with self._changed:
            workers = [*self._workers]
        for worker in workers:
            try:
                if is_over and not worker.channel.is_lost:
                    worker.channel.send("close", {}, deadline=time.monotonic() + 1)
            except PeerError as error:
                logger.warning("%s", error)
            worker.channel.close()
        os.close(self.descriptor)

    def join(self) -> None:
        """Have the workers of the engine connect, if it has a driver; raise PeerError and ConversionError."""
        if (driver := self._driver) is not None:
            call = _Call(
                lambda: driver.join(self.address, self._timeout), "the engine's workers could not connect"
            )
            self.wait_for(driver.workers, call.check)
            call.wait(self._timeout)

    def wait_for(self, count: int, check: Callable[[], None] = lambda: None) -> None:
        """Return when ``count`` workers are there.

        Raises PeerError after the timeout, and ConversionError if one cannot take the image.
        """
        deadline = time.monotonic() + self._timeout
        with self._changed:
            while len(self._workers) < count:
                if self._refused:
                    raise ConversionError(self._refused.pop())
                check()
                if time.monotonic() > deadline:
                    names = ", ".join(sorted(worker.name for worker in self._workers))
                    raise PeerError(
                        f"{len(self._workers)} of {count} workers have connected with {self.address} "
                        f"within {self._timeout:.0f} s: {names or 'none'}"
                    )
                self._changed.wait(min(0.25, max(0.0, deadline - time.monotonic())))

    def find_workers(self) -> list[Worker]:
        """Return the workers; raise PeerError if some have gone, which are left out the next time."""
        if self._driver is None:
            self.wait_for(self._count)
            self._count = 1
        with self._changed:
            lost = [worker for worker in self._workers if worker.channel.is_lost]
            workers = [worker for worker in self._workers if worker not in lost]
            self._workers = [*workers]
        for worker in lost:
            worker.channel.close()
        gone = {worker.name for worker in lost} - {worker.name for worker in workers}
        if gone:
            raise PeerError(
                f"{', '.join(sorted(gone))} died, or stopped answering, since the last push; nothing was "
                "pushed. The next push goes on without, or with it where it has come back"
            )
        if self._driver is not None and len(workers) < self._driver.workers:
            # A push to some workers only would leave one engine with two versions.
            raise PeerError(
                f"{len(workers)} of the engine's {self._driver.workers} workers are connected; nothing was "
                "pushed: call zerostart.refit again to reconnect the engine"
            )
        return workers

    def serve(self, workers: Sequence[Worker], version: int, sums: Sequence[Sums]) -> None:
        """Have the ``workers`` fill in ``version``, and the engine follow; return when they serve it.

        Raises PeerError and VerifyError, naming workers, and PeerError if a call of the engine fails.
        """
        if (driver := self._driver) is None:
            self._exchange(workers, version, sums, lambda: None)
            return
        call = _Call(lambda: driver.follow(version), f"the engine did not take version {version}")
        self._exchange(workers, version, sums, call.check)
        call.message = f"all workers have version {version}, but the engine's own call failed"
        call.wait(self._timeout)
        if (served := getattr(driver, "served", None)) is not None:
            _Call(lambda: served(version), call.message).wait(self._timeout)

    def _exchange(
        self, workers: Sequence[Worker], version: int, sums: Sequence[Sums], check: Callable[[], None]
    ) -> None:
        """Have the ``workers`` fill in ``version``, with these ``sums``; return when they serve it.

        Raises what ``check`` raises, PeerError, naming the workers that are lost, and VerifyError if what one
        read back differs.
        """
        deadline = time.monotonic() + self._timeout

        def exchange(worker: Worker, expected: Sums) -> ZerostartError | None:
            """Return the worker's failure; None if it serves the version."""
            try:
                worker.channel.send("fill", {"version": version, "sums": expected}, deadline=deadline)
                while True:
                    answer = worker.channel.receive("serving", "failed", deadline=deadline, check=check)
                    # It may have answered to a version that was given up since.
                    if answer.body["version"] == version:
                        why = answer.body.get("why")
                        return None if why is None else VerifyError(f"worker {worker.name}: {why}")
            except PeerError as error:
                if not worker.channel.closed:
                    raise  # a call of the engine
                return PeerError(f"worker {worker.name} died, or stopped answering: {error}")

        with ThreadPoolExecutor(max(1, len(workers)), "zerostart-refit-worker") as pool:
            results = [pool.submit(exchange, *each) for each in zip(workers, sums, strict=True)]
        errors = [result.result() for result in results]
        if failed := [error for error in errors if error is not None]:
            with self._changed:
                self._workers = [worker for worker in self._workers if not worker.channel.closed]
            serving = [w.name for w, error in zip(workers, errors, strict=True) if error is None]
            kind = next((VerifyError for error in failed if isinstance(error, VerifyError)), PeerError)
            raise kind(
                f"{'; '.join(map(str, failed))}. Version {version} is served by "
                f"{', '.join(serving) or 'nobody'}; push again; a lost worker may come back"
            )

    # Arrivals, in threads of their own.

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._is_closing:
                    return
                time.sleep(0.05)  # out of descriptors: some come back
                continue
            threading.Thread(target=self._welcome, args=(connection,), daemon=True).start()

    def _welcome(self, connection: socket.socket) -> None:
        channel = None
        try:
            channel = Channel(connection, "a process that has connected")
            self._greet(channel)
        except Exception as error:
            logger.warning("a worker could not join: %s", error)
            if channel is not None:
                channel.close()

    def _greet(self, channel: Channel) -> None:
        hello = channel.receive("hello", deadline=time.monotonic() + HELLO_TIMEOUT_S)
        deadline = time.monotonic() + self._timeout
        name = str(hello.body.get("name"))[:200]
        channel.who = f"worker {name}"
        if (protocol := hello.body.get("protocol")) != PROTOCOL:
            why = (
                f"it speaks protocol {protocol}, and the trainer {PROTOCOL}: install the same zerostart on "
                "both sides"
            )
            channel.send("refused", {"why": why}, deadline=deadline)
            raise ConfigError(f"worker {name}: {why}")
        body = {"entries": self._image.entries, "strict": self._settings.strict}
        channel.send("image", body, self.descriptor, deadline=deadline)
        answer = channel.receive("wants", "refused", deadline=deadline)
        with self._changed:
            self._changed.notify_all()
            if answer.kind == "refused":
                why = f"worker {name} cannot take these weights: {answer.body['why']}"
                self._refused.append(why)
                raise ConversionError(why)
            worker = Worker(name, channel, Runs.of(answer.body["rows"]))
            if worker.wants.end > self._image.nbytes or self._is_closing:
                raise PeerError(f"worker {name} wants bytes behind the end of the image, or comes too late")
            self._workers.append(worker)


class _Call:
    """An engine's own call in a thread: it may raise any error, or never return."""

    def __init__(self, work: Callable[[], object], message: str) -> None:
        self.message, self._work = message, work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="zerostart-refit-engine", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise PeerError if the call has failed."""
        if self._error is not None:
            raise PeerError(f"{self.message}: {self._error}")

    def wait(self, timeout: float) -> None:
        """Wait for the call to end; raise PeerError if it fails or takes longer."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise PeerError(f"{self.message}: it has not returned within {timeout:.0f} s")
        self.check()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # raised by check()
            self._error = error


def _remove_socket(process: int, path: Path, with_folder: bool) -> None:
    if os.getpid() != process:
        return  # forked from the trainer, which goes on
    path.unlink(missing_ok=True)
    if with_folder:
        path.parent.rmdir()
