"""A worker's connection with the trainer: what it says and what it does in each push."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from pathlib import Path

from zerostart.checkpoint.channel import PROTOCOL, Address, Message, connect, key_of
from zerostart.checkpoint.strict_json import JsonObject, load_json
from zerostart.errors import CheckpointError, ConfigError, PeerError
from zerostart.state.refitting.directory import directory_of
from zerostart.state.refitting.follower import Follower
from zerostart.state.refitting.image import Image
from zerostart.state.refitting.receiver import Receiver, Wants
from zerostart.state.refitting.sums import Sums
from zerostart.state.refitting.transports.base import Closed, Incoming, told_device, transport_kind

logger = logging.getLogger("zerostart")


class Connection:
    """One worker's connection; it runs in no thread of its own.

    ``follow`` takes part in one push, in the thread that calls it, whenever the engine has time for it.
    """

    def __init__(
        self,
        receiver: Receiver,
        address: str,
        *,
        secret: str | None = None,
        timeout: float = 300.0,
        within: float | None = None,
    ) -> None:
        """Connect with the trainer that listens at ``address``, or will ``within`` so many seconds.

        None: within ``timeout`` seconds, which all that it is to say is waited for. Then what the engine
        takes of the trainer's model is worked out and told. Raises ConfigError, PeerError, and
        ConversionError where the engine's loader cannot be followed.
        """
        self.receiver = receiver
        where = Address.of(address)
        self.name = receiver.name or f"{socket.gethostname()}-{os.getpid()}"
        self._timeout = timeout
        self._incoming: Incoming | None = None
        #: The version of it that the engine was filled with whole.
        self._since: int | None = None
        #: By fingerprint of the last image.
        self._known: tuple[str, Wants] | None = None
        left = timeout if within is None else within
        self._channel = connect(where, key_of(secret, where), left, patience=timeout)
        try:
            self._channel.send(
                "hello",
                {
                    "protocol": PROTOCOL,
                    "name": self.name,
                    "host": socket.gethostname(),
                    "pid": os.getpid(),
                    "version": receiver.version,
                },
            )
            self._take_image(self._channel.receive("image", "refused"))
        except PeerError as error:
            self.close()
            raise _LeftJoining(str(error)) from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def pending(self, seconds: float = 0.0) -> bool:
        """Whether the trainer has said something within so many seconds, which ``follow`` is for."""
        return self._channel.waiting(seconds)

    @property
    def is_lost(self) -> bool:
        """Whether the trainer is gone: another connection has to be made."""
        return self._channel.closed

    def follow(self, timeout: float | None = None, version: int | None = None) -> int:
        """Take part in the next push, which begins within ``timeout`` seconds; gives the version then served.

        None: those of the constructor. ``version``, where an engine is told of it, is the one that is to
        come: what was said of earlier ones, which were given up, is passed over.

        Raises what the push failed with: the tensors are then as before, and ``receiver.version`` says which
        version that is, or None where they were torn. Raises PeerError where the trainer is gone; a version
        on which it had decided is then served all the same, and no error.
        """
        until = time.monotonic() + (self._timeout if timeout is None else timeout)
        while True:
            message = self._channel.receive(
                "image", "prepare", "abort", "close", timeout=max(0.0, until - time.monotonic())
            )
            if message.kind == "image":
                self._take_image(message)
            elif message.kind == "prepare":
                if version is not None and int(message.body["version"]) < version:
                    continue
                return self._push(message.body)
            elif message.kind == "abort" and version is not None and message.body.get("version") == version:
                raise PeerError(self._given_up(version, str(message.body.get("why"))))
            elif message.kind == "close":
                raise Closed("the trainer has closed the refit; no further version comes")

    def close(self) -> None:
        """Close the connection, and release the transport; raises nothing."""
        self._channel.close()
        if self._incoming is not None:
            self._incoming.close()
            self._incoming = None

    def _take_image(self, message: Message) -> None:
        """Say what the engine takes of the image, or why it cannot take it."""
        if message.kind == "refused":
            raise ConfigError(f"{self._channel.who} refuses this worker: {message.body.get('why')}")
        try:
            if len(message.parts) != 1:
                raise CheckpointError("an image without its tensors")
            image = Image.from_bytes(message.parts[0])
            if self._known is None or self._known[0] != image.fingerprint:
                self._known = (
                    image.fingerprint,
                    self.receiver.plan(image, strict=message.body.get("strict") is not False),
                )
        except Exception as error:  # an engine's loader raises whatever it wants
            # Told as far as there is somebody to tell; the error itself is raised here.
            with contextlib.suppress(PeerError):
                self._channel.send("refused", {"why": f"{type(error).__name__}: {error}"})
            raise
        self._image = image
        wants = self._known[1]
        device, own = told_device(self.receiver.device)
        self._channel.send(
            "wants",
            {"device": device, "device_id": own},
            *(runs.to_bytes() for runs in (wants.runs, *wants.sets)),
        )

    def _push(self, body: JsonObject) -> int:
        version, opened = int(body["version"]), body.get("open")
        try:
            if opened is not None:
                self._open(opened)
            if self._incoming is None:
                raise ConfigError("a push began before its transport was opened; this is a bug in zerostart")
            assert self._known is not None, "the image comes first"
            self.receiver.renew(self._image, self._known[1])
            self._incoming.prepare(version, self._check)
        except _GivenUp as error:
            # Said all the same: the trainer may take it for one that has died.
            with contextlib.suppress(PeerError):
                self._channel.send("failed", {"version": version, "why": str(error)})
            raise PeerError(self._given_up(version, str(error))) from None
        except Exception as error:
            self._channel.send("failed", {"version": version, "why": f"{type(error).__name__}: {error}"})
            raise
        sums = None
        try:
            self._channel.send("prepared", {"version": version})
            answer = self._channel.receive("commit", "abort")
        except PeerError as lost:
            # The trainer has written down what it decided before it told anybody.
            sums = _decided(body.get("decision"), version, self.name)
            if sums is None:
                raise PeerError(self._given_up(version, str(lost))) from lost
        else:
            if answer.kind == "abort":
                raise PeerError(self._given_up(version, str(answer.body.get("why"))))
            sums = answer.body["sums"]
        return self._fill(version, sums)

    def _open(self, opened: JsonObject) -> None:
        if self._incoming is not None:
            self._incoming.close()
            self._incoming = None
        self._since = None
        assert self._known is not None, "the image comes first"
        kind = transport_kind(str(opened.get("transport")))
        self._incoming = kind.incoming(self._image, self._known[1].runs, dict(opened.get("parameters", {})))

    def _fill(self, version: int, sums: list[Sums]) -> int:
        assert self._incoming is not None, "prepared before"
        since, self._since = self._since, None
        try:
            self.receiver.fill(self._incoming, version, sums, since)
        except Exception as error:
            with contextlib.suppress(PeerError):
                self._channel.send("failed", {"version": version, "why": f"{type(error).__name__}: {error}"})
            raise
        finally:
            self._incoming.done()
        self._since = version
        # Served whether or not the trainer is still there to be told.
        with contextlib.suppress(PeerError):
            self._channel.send("serving", {"version": version})
        return version

    def _check(self) -> None:
        """Raise where the push was given up, or the trainer is gone."""
        if self._channel.waiting():
            try:
                message = self._channel.receive("abort")
            except PeerError as error:
                raise _GivenUp(str(error)) from None
            raise _GivenUp(str(message.body.get("why")))

    def _given_up(self, version: int, why: str) -> str:
        held = self.receiver.version
        serves = "the weights that it had" if held is None else f"version {held}"
        return f"version {version} was given up ({why}): {self.name} serves {serves}"


class _LeftJoining(PeerError):
    """The trainer was there, and went before this worker had joined it."""


class _GivenUp(Exception):
    """The version that a worker prepares for does not come."""


def _decided(path: object, version: int, name: str) -> list[Sums] | None:
    """The sums of ``version`` for this worker, if the trainer has decided to serve it."""
    if not isinstance(path, str):
        return None
    try:
        document = load_json(Path(path).read_bytes(), path, "decision")
    except (OSError, CheckpointError):
        return None
    return document["sums"].get(name) if document.get("version") == version else None


def serve(
    receiver: Receiver,
    address: str,
    *,
    secret: str | None = None,
    timeout: float = 300.0,
    patience: float = 600.0,
    stop: threading.Event | None = None,
) -> int | None:
    """Follow the pushes of the trainer at ``address`` until it closes, or ``stop`` is set; gives the version.

    ``file:///path`` is a directory into which one writes. In the calling thread. Where the trainer dies,
    another one is waited for at the same address for ``patience`` seconds. A push that fails is logged, and
    the next one followed. Raises what ``Connection`` raises, but for what a later push may mend.
    """
    directory = directory_of(address)
    until: float | None = None  # of the wait for another trainer; None: for the first one
    while stop is None or not stop.is_set():
        left = timeout if until is None else max(0.0, until - time.monotonic())
        try:
            connection = (
                Connection(receiver, address, secret=secret, timeout=timeout, within=left)
                if directory is None
                else Follower(receiver, directory, left)
            )
        except PeerError as error:
            if until is None:
                if not isinstance(error, _LeftJoining):
                    raise
                logger.warning("PeerError: %s", error)
                until = time.monotonic() + patience
            if time.monotonic() < until:
                time.sleep(0.1)  # a trainer that was about to die may still have answered
                continue
            logger.warning("no trainer is back: %s", error)
            break
        with connection:
            lost = False
            while not lost and not (stop is not None and stop.is_set()):
                if not connection.pending(0.5):
                    continue
                try:
                    connection.follow(timeout)
                except Closed:
                    return receiver.version
                except Exception as error:  # of the engine: whatever it raises, the next push may go well
                    logger.warning("%s: %s", type(error).__name__, error)
                    lost = connection.is_lost
        until = time.monotonic() + patience
    return receiver.version
