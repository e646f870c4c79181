"""A worker's connection with the trainer: what it says and does in each push."""

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
    """The trainer has said that no further version comes."""


class Connection:
    """One worker's connection; it runs in no thread of its own.

    ``follow`` takes part in one push, in the thread that calls it, whenever the engine has time for it.
    """

    def __init__(
        self, receiver: Receiver, address: str, *, timeout: float = 300.0, within: float | None = None
    ) -> None:
        """Connect with the trainer that listens at ``address``, or will ``within`` so many seconds.

        None: within ``timeout`` seconds, the deadline of every later exchange. Then what the engine takes of
        the trainer's model is found out and told. Raises ConfigError, PeerError, and ConversionError if the
        engine's loader cannot be followed.
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
        """Return whether the trainer has said something within so many seconds, which ``follow`` is for."""
        return self._channel.waiting(seconds)

    @property
    def is_lost(self) -> bool:
        """Whether the trainer is gone: another connection has to be made."""
        return self._channel.closed

    def follow(self, timeout: float | None = None, version: int | None = None) -> int:
        """Take part in the next push, which begins within ``timeout`` seconds; return its version.

        None: those of the constructor. An engine that is told the ``version`` to come skips earlier ones,
        which were given up.

        Raises VerifyError and what the engine raises, and ``receiver.version`` is None then. Raises PeerError
        if the trainer is gone; the tensors are as before.
        """
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        while True:
            message = self._channel.receive("fill", "close", deadline=deadline)
            if message.kind == "close":
                raise Closed("the trainer has closed the refit; no further version comes")
            if version is None or int(message.body["version"]) >= version:
                return self._fill(int(message.body["version"]), message.body["sums"])

    def close(self) -> None:
        """Close the connection, and unmap the image."""
        self._channel.close()
        if self._image is not None:
            self._image.close()
            self._image = None

    def _send(self, kind: str, body: dict[str, Any]) -> None:
        self._channel.send(kind, body, deadline=time.monotonic() + self._timeout)

    def _take_image(self, message: Message) -> None:
        if message.kind == "refused":
            raise ConfigError(f"{self._channel.who} refuses this worker: {message.body.get('why')}")
        image = Image.of(message.body["entries"])
        self._image = SharedImage(image, message.descriptor)
        try:
            self._plan = FillPlan(self.receiver, image, message.body.get("strict") is not False)
        except Exception as error:  # an engine's loader raises anything
            self._send("refused", {"why": f"{type(error).__name__}: {error}"})
            raise
        self._send("wants", {"rows": self._plan.wants.rows.tolist()})

    def _fill(self, version: int, sums: Any) -> int:
        assert self._image is not None, "not closed"
        try:
            self._plan.fill(self._image)
            self._plan.check(sums, version)
        except Exception as error:  # an engine raises anything
            self._send("failed", {"version": version, "why": f"{type(error).__name__}: {error}"})
            raise
        try:
            self._send("serving", {"version": version})
        except PeerError as error:
            logger.warning("%s serves version %s, and cannot say so: %s", self.name, version, error)
        return version


def serve(receiver: Receiver, address: str, *, timeout: float = 300.0, patience: float = 600.0) -> int | None:
    """Follow the pushes of the trainer at ``address`` until it closes; return the version.

    In the calling thread. A trainer has to come within ``timeout`` seconds. If it dies, another one is waited
    for at the same address for ``patience`` seconds. A push that fails is logged, and the next one followed.
    Raises what ``Connection`` raises, except for what a later push may mend.
    """
    deadline, is_first = time.monotonic() + timeout, True
    while True:
        try:
            left = max(0.0, deadline - time.monotonic())
            connection = Connection(receiver, address, timeout=timeout, within=left)
        except PeerError as error:
            logger.warning("PeerError: %s", error)
            if time.monotonic() > deadline:
                if is_first:
                    raise
                return receiver.version
            time.sleep(0.1)  # a trainer that was about to die may still have answered
            continue
        with connection:
            while not connection.is_lost:
                try:
                    if connection.pending(0.5):
                        connection.follow(timeout)
                except Closed:
                    return receiver.version
                except Exception as error:  # of the engine: the next push may succeed
                    logger.warning("%s: %s", type(error).__name__, error)
        deadline, is_first = time.monotonic() + patience, False


class EngineWorker:
    """In an engine's worker process: its model, and its connection with a trainer while there is one."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self._connection: Connection | None = None

    def join(self, address: str, timeout: float = 300.0) -> None:
        """Connect with a trainer, in the place of the one before; raise what ``Connection`` raises."""
        self.leave()
        self._connection = Connection(self.receiver, address, timeout=timeout)

    def follow(self, version: int) -> int:
        """Take part in the push of ``version``; raise what it fails with."""
        if self._connection is None:
            raise ConfigError(f"version {version} cannot be taken: this worker has not joined a trainer")
        return self._connection.follow(version=version)

    def leave(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()


def worker_of(model: nn.Module, weights: EngineWeights, role: str) -> EngineWorker:
    """Return the worker of a model, the same at each call; ``role`` tells workers apart in messages."""
    found = vars(model).get("_zerostart_worker")
    if found is None:
        name = f"{socket.gethostname()}-{os.getpid()}-{role}"
        found = vars(model)["_zerostart_worker"] = EngineWorker(Receiver(weights, name=name))
    assert isinstance(found, EngineWorker), "the attribute is ours"
    return found
