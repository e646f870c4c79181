"""Connect an engine's worker with a trainer, and take part in its pushes."""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import Any

from torch import nn

from zerostart.errors import ConfigError, PeerError
from zerostart.refit.image import Image, SharedImage
from zerostart.refit.receiver import EngineWeights, FillPlan, Receiver
from zerostart.refit.wire import PROTOCOL, Message, connect, socket_path

logger = logging.getLogger("zerostart")


class Closed(PeerError):
    """The trainer has closed the refit; no further version follows."""


class Connection:
    """Connection of one worker with a trainer.

    It starts no thread: the engine calls ``follow`` when it has time for a push.
    """

    def __init__(
        self, receiver: Receiver, address: str, *, timeout: float = 300.0, within: float | None = None
    ) -> None:
        """Connect with the trainer at ``address`` and send the bytes that this worker needs.

        The trainer may start to listen up to ``within`` seconds later; None means ``timeout``. ``timeout``
        limits every later exchange, in seconds. Raises ConfigError, PeerError, and ConversionError if the
        engine's loader cannot be traced.
        """
        self.receiver = receiver
        self.name = receiver.name or f"{socket.gethostname()}-{os.getpid()}"
        self._timeout = timeout
        self._image: SharedImage | None = None
        within = timeout if within is None else within
        self._channel = connect(socket_path(address), time.monotonic() + within)
        try:
            self._send("hello", {"protocol": PROTOCOL, "name": self.name})
            message = self._channel.receive("image", "refused", deadline=time.monotonic() + timeout)
            self._take_image(message)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def pending(self, seconds: float = 0.0) -> bool:
        """Wait for a message from the trainer; False after ``seconds``."""
        return self._channel.waiting(seconds)

    @property
    def is_lost(self) -> bool:
        """True if the trainer is gone: make another connection."""
        return self._channel.closed

    def follow(self, timeout: float | None = None, version: int | None = None) -> int:
        """Take part in the next push; return its version.

        The push must begin within ``timeout`` seconds; None means the constructor's. With ``version``,
        earlier pushes, which the trainer gave up, are skipped.

        Raises VerifyError and the engine's own errors; ``receiver.version`` is None afterwards. Raises
        PeerError if the trainer is gone; the tensors keep their values.
        """
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        while True:
            message = self._channel.receive("fill", "close", deadline=deadline)
            if message.kind == "close":
                raise Closed("the trainer has closed the refit; no further version follows")
            if version is None or int(message.body["version"]) >= version:
                return self._fill(int(message.body["version"]), message.body["sums"])

    def close(self) -> None:
        """Close the connection and unmap the image."""
        self._channel.close()
        if self._image is not None:
            self._image.close()
            self._image = None

    def _send(self, kind: str, body: dict[str, Any]) -> None:
        self._channel.send(kind, body, deadline=time.monotonic() + self._timeout)

    def _take_image(self, message: Message) -> None:
        if message.kind == "refused":
            raise ConfigError(f"{self._channel.peer} refuses this worker: {message.body.get('why')}")
        image = Image.of(message.body["entries"])
        self._image = SharedImage(image, message.descriptor)
        try:
            self._plan = FillPlan(self.receiver, image, message.body.get("strict") is not False)
        except Exception as error:  # the engine's loader may raise any error
            self._send("refused", {"why": f"{type(error).__name__}: {error}"})
            raise
        self._send("wants", {"rows": self._plan.wants.rows.tolist()})
        self._channel.receive("joined", deadline=time.monotonic() + self._timeout)

    def _fill(self, version: int, sums: Any) -> int:
        assert self._image is not None, "not closed"
        try:
            self._plan.fill(self._image)
            self._plan.check(sums, version)
        except Exception as error:  # the engine may raise any error
            self._send("failed", {"version": version, "why": f"{type(error).__name__}: {error}"})
            raise
        try:
            self._send("serving", {"version": version})
        except PeerError as error:
            logger.warning("%s serves version %s, but cannot tell the trainer: %s", self.name, version, error)
        return version


def serve(receiver: Receiver, address: str, *, timeout: float = 300.0, patience: float = 600.0) -> int | None:
    """Follow the pushes of the trainer at ``address`` until it closes; return the version.

    Runs in the calling thread. A trainer must listen within ``timeout`` seconds. If it dies, wait
    ``patience`` seconds for another one at the same address. A failed push is logged, and the next one is
    followed. Raises the errors of ``Connection`` if no trainer was reached.
    """
    deadline, is_first = time.monotonic() + timeout, True
    while True:
        try:
            remaining_s = max(0.0, deadline - time.monotonic())
            connection = Connection(receiver, address, timeout=timeout, within=remaining_s)
        except PeerError as error:
            logger.warning("PeerError: %s", error)
            if time.monotonic() > deadline:
                if is_first:
                    raise
                return receiver.version
            time.sleep(0.1)  # a dying trainer may still have answered
            continue
        with connection:
            while not connection.is_lost:
                try:
                    if connection.pending(0.5):
                        connection.follow(timeout)
                except Closed:
                    return receiver.version
                except Exception as error:  # the next push may succeed
                    logger.warning("%s: %s", type(error).__name__, error)
        deadline, is_first = time.monotonic() + patience, False


class EngineWorker:
    """Model in an engine's worker process, with its connection to a trainer, if any."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self._connection: Connection | None = None

    def join(self, address: str, timeout: float = 300.0) -> None:
        """Connect with a trainer and leave the one before; raise the errors of ``Connection``."""
        self.leave()
        self._connection = Connection(self.receiver, address, timeout=timeout)

    def follow(self, version: int) -> int:
        """Take part in the push of ``version``; raise its errors."""
        if self._connection is None:
            raise ConfigError(f"this worker has not joined a trainer and cannot load version {version}")
        return self._connection.follow(version=version)

    def leave(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()


def get_worker(model: nn.Module, weights: EngineWeights, role: str) -> EngineWorker:
    """Return the one worker of a model; ``role`` distinguishes workers in messages."""
    worker: EngineWorker | None = vars(model).get("_zerostart_worker")
    if worker is None:
        name = f"{socket.gethostname()}-{os.getpid()}-{role}"
        worker = vars(model)["_zerostart_worker"] = EngineWorker(Receiver(weights, name=name))
    return worker
