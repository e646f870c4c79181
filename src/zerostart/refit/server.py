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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from zerostart.errors import ConfigError, ConversionError, PeerError, VerifyError, ZerostartError
from zerostart.refit.image import Image, Runs, Sums, make_memory
from zerostart.refit.wire import PROTOCOL, Channel, Message, listen

logger = logging.getLogger("zerostart")
#: Seconds within which a process that has connected says what it is.
HELLO_TIMEOUT_S = 20.0


@dataclass
class Worker:
    """A worker that is connected."""

    name: str
    channel: Channel
    wants: Runs
    #: Sets of elements of which it sums up digests, as ``Runs.to_bytes``.
    sets: Sequence[bytes]
    #: Whether it has confirmed the last version.
    serves: bool = False


class WorkerServer:
    """Listens for workers, and speaks with those that are there. Every rank gets the image from it, too."""

    def __init__(self, path: Path | None, image: Image, timeout: float, strict: bool) -> None:
        """Raises ConfigError if nobody can listen at ``path``, and WriteError for want of memory."""
        self._image, self._timeout, self._strict = image, timeout, strict
        self._changed = threading.Condition()
        self._arrived: dict[str, Worker] = {}
        self._refused: dict[str, str] = {}
        self._is_closing = False
        self.workers: dict[str, Worker] = {}
        self._listener, self.path = listen(path)
        # Also at the end of a script that does not close it.
        self._remove = weakref.finalize(self, _remove_socket, os.getpid(), self.path, path is None)
        self._descriptor = make_memory(image)
        self._thread = threading.Thread(target=self._accept, name="zerostart-refit", daemon=True)
        self._thread.start()

    def close(self, is_over: bool) -> None:
        """End all connections. Workers are told that it ``is_over``, or wait for another trainer."""
        self._is_closing = True
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._listener.close()
        self._remove()
        with self._changed:
            everybody = [*self.workers.values(), *self._arrived.values()]
            self.workers, self._arrived = {}, {}
        for worker in everybody:
            try:
                if is_over and not worker.channel.waiting():  # that of one that has gone is at its end
                    worker.channel.send("close", {}, deadline=time.monotonic() + 1)
            except PeerError as error:
                logger.warning("%s", error)
            worker.channel.close()
        os.close(self._descriptor)

    def wait_for(self, count: int, check: Callable[[], None] = lambda: None) -> None:
        """Return when ``count`` workers are there.

        Raises PeerError after the timeout, and ConversionError if one cannot take the image.
        """
        deadline = time.monotonic() + self._timeout
        with self._changed:
            while len(names := self.workers.keys() | self._arrived.keys()) < count:
                self._check_refused()
                check()
                if time.monotonic() > deadline:
                    raise PeerError(
                        f"{len(names)} of {count} workers have connected with unix://{self.path} within "
                        f"{self._timeout:.0f} s" + (f": {', '.join(sorted(names))}" if names else "")
                    )
                self._changed.wait(min(0.25, max(0.0, deadline - time.monotonic())))
            self._check_refused()

    def settle(self) -> None:
        """Take in the workers that have come; raise PeerError if some have gone, which are left out then."""
        with self._changed:
            arrived, self._arrived = self._arrived, {}
        for name, worker in arrived.items():
            if (before := self.workers.pop(name, None)) is not None:
                logger.warning("worker %s has come back: the next push brings it up to date", name)
                before.channel.close()
            self.workers[name] = worker
        for worker in self.workers.values():
            self._drain(worker)
        gone = [name for name, worker in self.workers.items() if worker.channel.closed]
        for name in gone:
            del self.workers[name]
        if gone:
            raise PeerError(
                f"{', '.join(gone)} died, or stopped answering, since the last push; nothing was pushed. "
                "The next push goes on without, or with it where it has come back"
            )

    def serve(self, version: int, sums: Mapping[str, Sequence[Sums]], check: Callable[[], None]) -> None:
        """Have all workers fill in ``version``, whose ``sums`` are by worker; return when they serve it.

        Raises what ``check`` raises, PeerError, naming the workers that are lost, and VerifyError if what one
        read back differs.
        """
        deadline = time.monotonic() + self._timeout

        def exchange(worker: Worker) -> str:
            """Return the worker's failure; empty if it serves the version."""
            worker.serves = False
            worker.channel.send("fill", {"version": version, "sums": sums[worker.name]}, deadline=deadline)
            while True:
                answer = worker.channel.receive("serving", "failed", deadline=deadline, check=check)
                # It may have answered to a version that was given up since.
                if answer.body.get("version") == version:
                    break
            worker.serves = answer.kind == "serving"
            return "" if worker.serves else f"worker {worker.name}: {answer.body.get('why')}"

        failed, lost, other = [], [], []
        with ThreadPoolExecutor(max(1, len(self.workers)), "zerostart-refit-worker") as pool:
            waiting = {name: pool.submit(exchange, worker) for name, worker in self.workers.items()}
        for name, result in waiting.items():
            error = result.exception()
            if error is None:
                failed += [result.result()] if result.result() else []
            elif self.workers[name].channel.closed:
                lost.append(name)
                del self.workers[name]
                logger.warning(
                    "worker %s is lost; pushes go on without it until it comes back: %s", name, error
                )
            else:
                other.append(error)
        if other:
            raise other[0]
        rest = ", ".join(name for name, worker in self.workers.items() if worker.serves) or "nobody"
        if failed:
            raise VerifyError(
                f"{'; '.join(failed)}. It serves no version now; version {version} is served by {rest}; push "
                "again"
            )
        if lost:
            raise PeerError(
                f"{', '.join(lost)} died, or stopped answering, after version {version} was decided; version "
                f"{version} is served by {rest}. The next push goes on without, or with it where it has come "
                "back"
            )

    def _drain(self, worker: Worker) -> None:
        while not worker.channel.closed and worker.channel.waiting():
            try:
                worker.channel.receive("serving", "failed", deadline=time.monotonic() + 1)
            except PeerError as error:
                logger.warning("%s", error)

    def _check_refused(self) -> None:
        """Raise ConversionError if a worker cannot take the image."""
        refused, self._refused = self._refused, {}
        if refused:
            name, why = next(iter(refused.items()))
            more = f" (and {len(refused) - 1} more workers)" if len(refused) > 1 else ""
            raise ConversionError(f"worker {name} cannot take these weights{more}: {why}")

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
        try:
            channel = Channel(connection, "a process that has connected")
            try:
                self._greet(channel)
            except BaseException:
                channel.close()
                raise
        except ZerostartError as error:
            logger.warning("a worker could not join: %s", error)

    def _greet(self, channel: Channel) -> None:
        hello = channel.receive("hello", "rank", deadline=time.monotonic() + HELLO_TIMEOUT_S)
        deadline = time.monotonic() + self._timeout
        image = self._image.to_bytes()
        if hello.kind == "rank":
            channel.send("image", {}, image, deadline=deadline, descriptor=self._descriptor)
            channel.close()
            return
        name = str(hello.body.get("name"))[:200]
        channel.who = f"worker {name}"
        if why := self._refusal(name, hello):
            channel.send("refused", {"why": why}, deadline=deadline)
            raise ConfigError(f"worker {name}: {why}")
        body = {"strict": self._strict}
        channel.send("image", body, image, deadline=deadline, descriptor=self._descriptor)
        answer = channel.receive("wants", "refused", deadline=deadline)
        with self._changed:
            if answer.kind == "refused":
                self._refused[name] = str(answer.body.get("why"))
            else:
                wants, *sets = answer.parts or [b""]
                runs = Runs.from_bytes(wants)
                if any(each.end > self._image.nbytes for each in (runs, *map(Runs.from_bytes, sets))):
                    raise PeerError(f"worker {name} wants bytes behind the end of the image")
                self._arrived[name] = Worker(name, channel, runs, sets)
                if self._is_closing:
                    channel.close()
            self._changed.notify_all()
        if answer.kind == "refused":
            channel.close()

    def _refusal(self, name: str, hello: Message) -> str:
        """Return the reason not to take in a worker, if there is one."""
        if hello.body.get("protocol") != PROTOCOL:
            return (
                f"it speaks protocol {hello.body.get('protocol')}, and the trainer {PROTOCOL}: install the "
                "same zerostart on both sides"
            )
        with self._changed:
            before = self._arrived.get(name) or self.workers.get(name)
        if before is not None and not before.channel.closed and not before.channel.waiting():
            return f"another worker is connected under the name {name}: give each a name of its own"
        return ""


def _remove_socket(process: int, path: Path, with_folder: bool) -> None:
    if os.getpid() != process:
        return  # forked from the trainer, which goes on
    path.unlink(missing_ok=True)
    if with_folder:
        path.parent.rmdir()
