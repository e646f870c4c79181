"""Connections of a trainer with its workers, on rank 0.

Workers may connect at any time. Each connection has a thread until the worker has said which bytes it needs.
Everything else happens in the thread that calls ``push``.
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
from pathlib import Path
from typing import NamedTuple

from zerostart.errors import ConfigError, ConversionError, PeerError, VerifyError, ZerostartError
from zerostart.refit.image import ByteSet, Image, Sums, make_memory
from zerostart.refit.pushes import RefitSettings
from zerostart.refit.wire import PROTOCOL, Channel, Driver, listen

logger = logging.getLogger("zerostart")
#: Seconds to wait for the first message of a connection.
HELLO_TIMEOUT_S = 20.0


class Worker(NamedTuple):
    """A connected worker and the bytes of the image that it needs."""

    name: str
    channel: Channel
    wants: ByteSet


class WorkerServer:
    """Server that accepts workers and runs pushes with them."""

    def __init__(
        self, path: Path | None, image: Image, driver: Driver | None, settings: RefitSettings
    ) -> None:
        """Listen at ``path``; raise ConfigError if that fails, and WriteError without memory."""
        self._image, self._driver, self._settings = image, driver, settings
        self._count, self._timeout = settings.workers or 1, settings.timeout
        self._changed = threading.Condition()
        self._workers: list[Worker] = []
        self._refused: list[str] = []
        self._is_closing = False
        self._listener, bound = listen(path)
        self.address = f"unix://{bound}"
        # Runs at exit, too, for scripts that never call close().
        self._remove = weakref.finalize(self, _remove_socket, os.getpid(), bound, path is None)
        self.descriptor = make_memory(image)
        self._thread = threading.Thread(target=self._accept, name="zerostart-refit", daemon=True)
        self._thread.start()

    def close(self, is_over: bool) -> None:
        """Close all connections; with ``is_over`` workers stop, otherwise they wait for a trainer."""
        if self._driver is not None:
            try:
                self._driver.leave()
            except Exception as error:  # the engine may be gone
                logger.warning("the engine's workers could not disconnect: %s", error)
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
        """Let the engine's workers connect; raise PeerError and ConversionError."""
        if (driver := self._driver) is not None:
            call = _EngineCall(
                lambda: driver.join(self.address, self._timeout), "the engine's workers could not connect"
            )
            self.wait_for(driver.workers or 1, call)
            call.check()
            self._count = len(self._workers)

    def wait_for(self, count: int, call: _EngineCall | None = None) -> None:
        """Wait until at least ``count`` workers are connected, and all that ``call`` has started.

        Raises PeerError after the timeout or if ``call`` fails, and ConversionError if a worker cannot load
        the image.
        """
        deadline = time.monotonic() + self._timeout
        with self._changed:
            while len(self._workers) < count or (call and call.is_alive()):
                if self._refused:
                    raise ConversionError(self._refused.pop())
                if call:
                    call.check()
                if time.monotonic() > deadline:
                    names = ", ".join(sorted(worker.name for worker in self._workers))
                    raise PeerError(
                        f"{len(self._workers)} of {count} workers have connected with {self.address} "
                        f"within {self._timeout:.0f} s: {names or 'none'}"
                    )
                self._changed.wait(min(0.25, max(0.0, deadline - time.monotonic())))

    def find_workers(self) -> list[Worker]:
        """Return the workers; raise PeerError if one has died since the last call."""
        if self._driver is None:
            self.wait_for(self._count)
            self._count = 1  # later pushes use the workers that are left
        with self._changed:
            closed = [worker for worker in self._workers if worker.channel.is_lost]
            workers = [worker for worker in self._workers if worker not in closed]
            self._workers = [*workers]
        for worker in closed:
            worker.channel.close()
        dead = {worker.name for worker in closed} - {worker.name for worker in workers}
        if dead:
            raise PeerError(
                f"{', '.join(sorted(dead))} died, or stopped answering, since the last push; nothing was "
                "pushed. Push again: the next push uses the workers that are connected"
            )
        if self._driver is not None and len(workers) < self._count:
            # A push to some workers only would leave one engine with two versions.
            raise PeerError(
                f"{len(workers)} of the engine's {self._count} workers are connected; nothing was "
                "pushed: call zerostart.refit again to reconnect the engine"
            )
        return workers

    def serve(self, workers: Sequence[Worker], version: int, sums: Sequence[Sums]) -> None:
        """Let the ``workers`` load ``version`` and the engine follow; wait until all serve it.

        Raises PeerError and VerifyError, naming workers, and PeerError if a call of the engine fails.
        """
        if (driver := self._driver) is None:
            self._exchange(workers, version, sums, lambda: None)
            return
        call = _EngineCall(lambda: driver.follow(version), f"the engine did not take version {version}")
        self._exchange(workers, version, sums, call.check)
        call.message = f"all workers have version {version}, but the engine's own call failed"
        call.wait(self._timeout)
        if (served := getattr(driver, "served", None)) is not None:
            _EngineCall(lambda: served(version), call.message).wait(self._timeout)

    def _exchange(
        self, workers: Sequence[Worker], version: int, sums: Sequence[Sums], check: Callable[[], None]
    ) -> None:
        """Let the ``workers`` load ``version`` and compare ``sums``; wait until all serve it.

        Raises the errors of ``check``, PeerError if workers are lost, and VerifyError if values differ.
        """
        deadline = time.monotonic() + self._timeout

        def exchange(worker: Worker, expected: Sums) -> ZerostartError | None:
            """Return the worker's error; None if it serves the version."""
            try:
                worker.channel.send("fill", {"version": version, "sums": expected}, deadline=deadline)
                while True:
                    answer = worker.channel.receive("serving", "failed", deadline=deadline, check=check)
                    # Skip late answers to earlier versions.
                    if answer.body["version"] == version:
                        why = answer.body.get("why")
                        return None if why is None else VerifyError(f"worker {worker.name}: {why}")
            except PeerError as error:
                if not worker.channel.closed:
                    raise  # an error of `check`
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

    # Accept workers, in other threads.

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._is_closing:
                    return
                time.sleep(0.05)  # out of file descriptors: retry
                continue
            threading.Thread(target=self._welcome, args=(connection,), daemon=True).start()

    def _welcome(self, connection: socket.socket) -> None:
        try:
            self._greet(Channel(connection, "a process that has connected"))
        except Exception as error:
            logger.warning("a worker could not join: %s", error)
            connection.close()

    def _greet(self, channel: Channel) -> None:
        hello = channel.receive("hello", deadline=time.monotonic() + HELLO_TIMEOUT_S)
        deadline = time.monotonic() + self._timeout
        name = str(hello.body.get("name"))[:200]
        channel.peer = f"worker {name}"
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
            worker = Worker(name, channel, ByteSet.of(answer.body["rows"]))
            if worker.wants.end > self._image.nbytes or self._is_closing:
                raise PeerError(f"worker {name} asks for bytes outside the image, or the refit is closed")
            # Under the lock: the worker's join may end now, and whoever waits for it counts the workers.
            channel.send("joined", {}, deadline=deadline)
            self._workers.append(worker)


class _EngineCall(threading.Thread):
    """A thread that calls the engine; the call may fail or never return."""

    def __init__(self, work: Callable[[], object], message: str) -> None:
        super().__init__(name="zerostart-refit-engine", daemon=True)
        self.message, self._work = message, work
        self._error: BaseException | None = None
        self.start()

    def check(self) -> None:
        """Raise PeerError if the call has failed."""
        if self._error is not None:
            raise PeerError(f"{self.message}: {self._error}")

    def wait(self, timeout: float) -> None:
        """Wait for the call; raise PeerError if it fails or exceeds ``timeout``."""
        self.join(timeout)
        if self.is_alive():
            raise PeerError(f"{self.message}: it has not returned within {timeout:.0f} s")
        self.check()

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # raised by check()
            self._error = error


def _remove_socket(process: int, path: Path, with_folder: bool) -> None:
    if os.getpid() != process:
        return  # a fork of the trainer
    path.unlink(missing_ok=True)
    if with_folder:
        path.parent.rmdir()
