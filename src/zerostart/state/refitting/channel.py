"""Messages between a worker and rank 0 of the trainer: JSON and bytes, of bounded length, never a pickle.

Over the connections of the standard library, TCP or a Unix socket; either side proves that it knows the
job's secret before the other reads a message. Every wait has a time-out.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import os
import re
import socket
import struct
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import NamedTuple

from zerostart.checkpoint.strict_json import JsonObject, load_json
from zerostart.errors import CheckpointError, ConfigError, PeerError

#: Changes with what the messages mean.
PROTOCOL = 1
#: Most bytes of one part of a message, and most parts after its head.
MAX_BYTES, MAX_PARTS = 256 << 20, 4096
#: Seconds within which somebody who has connected must have proved that it knows the secret.
HANDSHAKE = 20.0
#: Where the secret is taken from if it is not given.
SECRET_VARIABLE = "ZEROSTART_REFIT_SECRET"


class Message(NamedTuple):
    """What it is, what it says, and the bytes that go with it."""

    kind: str
    body: JsonObject
    parts: list[bytes]


class Address(NamedTuple):
    """Where rank 0 of the trainer listens."""

    #: As the standard library calls it.
    family: str
    place: str | tuple[str, int]

    @classmethod
    def of(cls, text: str) -> Address:
        """``unix:///path``, or ``HOST:PORT`` with or without ``tcp://`` before it; raises ConfigError."""
        if match := re.fullmatch(r"unix:(?://)?(/.+)", text):
            return cls("AF_UNIX", match[1])
        if (match := re.fullmatch(r"(?:tcp://)?([^:/\[\]]+):(\d{1,5})/?", text)) and int(match[2]) < 1 << 16:
            return cls("AF_INET", (match[1], int(match[2])))
        raise ConfigError(
            f"{text!r} is no address of a trainer: give unix:///path/of/a/socket or tcp://HOST:PORT"
        )

    def __str__(self) -> str:
        if isinstance(self.place, str):
            return f"unix://{self.place}"
        return f"tcp://{self.place[0]}:{self.place[1]}"

    @property
    def is_local(self) -> bool:
        """Whether nobody on another machine can reach it."""
        if isinstance(self.place, str) or self.place[0] == "localhost":
            return True
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.place[0]).is_loopback
        return False


def key_of(secret: str | None, address: Address) -> bytes:
    """What both sides have to know; ``secret`` is None for that of the environment.

    Raises ConfigError where others could connect and there is none.
    """
    given = os.environ.get(SECRET_VARIABLE, "") if secret is None else secret
    if not given and not address.is_local:
        raise ConfigError(
            f"{address} can be reached from other machines: pass secret=..., or set {SECRET_VARIABLE}, to "
            f"the "
            "same value for the trainer and all workers"
        )
    # Hashed, so that an empty one is a key, too, which the library wants.
    return hashlib.sha256(b"zerostart refit " + given.encode()).digest()


class Channel:
    """One connection; ``who`` is the other side in messages. Raises PeerError wherever that does not "
    "answer."""

    def __init__(self, connection: Connection, who: str, timeout: float) -> None:
        self.who = who
        self._connection = connection
        self._timeout = timeout
        self._set_patience(timeout)

    def prove(self, key: bytes, asking: bool) -> None:
        """Both sides prove that they know ``key``; one of them is ``asking`` first."""
        self._set_patience(HANDSHAKE)
        try:
            for ask in (asking, not asking):
                (deliver_challenge if ask else answer_challenge)(self._connection, key)
        except (AuthenticationError, EOFError, OSError, ValueError, AssertionError) as error:
            self.close()
            raise PeerError(
                f"{self.who} does not know the secret of this refit, or is no zerostart: give both sides "
                f"the same "
                f"secret, or the same {SECRET_VARIABLE}"
            ) from error
        self._set_patience(self._timeout)

    def send(self, kind: str, body: JsonObject | None = None, *parts: bytes) -> None:
        """Send a message."""
        head = json.dumps({"kind": kind, "parts": len(parts), "body": body or {}}).encode()
        try:
            for data in (head, *parts):
                self._connection.send_bytes(data)
        except (OSError, EOFError) as error:
            raise self._lost(error) from error

    def receive(self, *kinds: str, timeout: float | None = None) -> Message:
        """The next message, which has to be one of ``kinds`` (none: any), within ``timeout`` seconds.

        None: those that the channel was made with.
        """
        limit = self._timeout if timeout is None else timeout
        try:
            if not self._connection.poll(limit):
                raise PeerError(f"{self.who} has not answered within {limit:.0f} s")
            head = load_json(self._connection.recv_bytes(MAX_BYTES), self.who, "message", any_number=True)
            kind, body, count = head.get("kind"), head.get("body"), head.get("parts")
            if not isinstance(kind, str) or not isinstance(body, dict) or type(count) is not int:
                raise CheckpointError(f"{self.who}: a message without kind, body or parts")
            if not 0 <= count <= MAX_PARTS:
                raise CheckpointError(f"{self.who}: a message of {count} parts")
            parts = [self._connection.recv_bytes(MAX_BYTES) for _ in range(count)]
        except (OSError, EOFError, CheckpointError) as error:
            raise self._lost(error) from error
        if kinds and kind not in kinds:
            self.close()
            raise PeerError(f"{self.who} said {kind!r:.40} where {' or '.join(kinds)} was expected")
        return Message(kind, body, parts)

    def waiting(self, seconds: float = 0.0) -> bool:
        """Whether a message, or the end of the connection, is there to be received."""
        try:
            return self._connection.poll(seconds)
        except (OSError, EOFError):
            return True

    def wait(self, check: Callable[[], None]) -> None:
        """Return when a message is there; meanwhile call ``check`` now and then."""
        while not self.waiting(0.5):
            check()

    @property
    def closed(self) -> bool:
        """Whether this side has closed it, or has found it lost."""
        return self._connection.closed

    def close(self) -> None:
        """Close the connection; raises nothing."""
        with contextlib.suppress(OSError):
            self._connection.close()

    def _lost(self, error: BaseException) -> PeerError:
        # What is half sent or half read cannot be gone on with.
        self.close()
        why = "" if isinstance(error, EOFError) or not str(error) else f" ({error})"
        return PeerError(f"the connection with {self.who} is lost{why}: it died, or the network between")

    def _set_patience(self, seconds: float) -> None:
        """Let a read or a write that stops in the middle of a message fail, and not wait for ever."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as raw:
            limit = struct.pack("ll", int(seconds), 0)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def connect(address: Address, key: bytes, timeout: float) -> Channel:
    """A channel with the trainer that listens at ``address``, or will within ``timeout`` seconds."""
    until = time.monotonic() + timeout
    while True:
        try:
            connection = Client(address.place, address.family)
            break
        except OSError as error:
            if time.monotonic() > until:
                raise PeerError(f"no trainer listens at {address}: {error.strerror}") from error
            time.sleep(0.1)
    channel = Channel(connection, f"the trainer at {address}", timeout)
    channel.prove(key, asking=False)
    return channel
