"""Messages between processes of several jobs: JSON and bytes, of bounded length, never a pickle.

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
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import NamedTuple

from zerostart.checkpoint.strict_json import JsonObject, load_json
from zerostart.errors import CheckpointError, ConfigError, PeerError

#: Changes with what the messages mean.
PROTOCOL = 1
#: Most bytes of one part of a message, and most parts after its head.
MAX_BYTES, MAX_PARTS = 256 << 20, 4096
#: Seconds within which somebody who has connected must have proved that it knows the secret.
HANDSHAKE = 20.0
#: Most seconds that are waited at a time: the system counts milliseconds in 31 bits.
LONGEST = 1e6
#: A wire that has gone dead says nothing: after 30 seconds without a word the system asks whether the other
#: machine is there, and after three more questions, 10 seconds apart, gives the connection up. Its own two
#: hours would have a worker wait that long for a trainer that has long made another connection.
ALIVE = {
    getattr(socket, name): value
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
}


class Purpose(NamedTuple):
    """What connections are for."""

    #: In words.
    name: str
    #: Of the environment, where the secret is taken from if it is not given.
    variable: str
    #: Whose address it is, and who has to know the secret, in words.
    listener: str
    everybody: str


REFIT = Purpose("refit", "ZEROSTART_REFIT_SECRET", "a trainer", "the trainer and all workers")


class Key(NamedTuple):
    """What both sides have to know, and what for."""

    data: bytes
    purpose: Purpose


class Message(NamedTuple):
    """What it is, what it says, and the bytes that go with it."""

    kind: str
    body: JsonObject
    parts: list[bytes]


class Address(NamedTuple):
    """Where somebody listens."""

    #: As the standard library calls it.
    family: str
    place: str | tuple[str, int]

    @classmethod
    def of(cls, text: str, purpose: Purpose = REFIT) -> Address:
        """``unix:///path``, or ``HOST:PORT`` with or without ``tcp://`` before it; raises ConfigError."""
        if match := re.fullmatch(r"unix:(?://)?(/.+)", text):
            return cls("AF_UNIX", match[1])
        if (match := re.fullmatch(r"(?:tcp://)?([^:/\[\]]+):(\d{1,5})/?", text)) and int(match[2]) < 1 << 16:
            return cls("AF_INET", (match[1], int(match[2])))
        raise ConfigError(
            f"{text.rpartition('@')[2]!r} is no address of {purpose.listener}: give "
            "unix:///path/of/a/socket or tcp://HOST:PORT"
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


def key_of(secret: str | None, address: Address, purpose: Purpose = REFIT) -> Key:
    """What both sides have to know; ``secret`` is None for that of the environment.

    Raises ConfigError where others could connect and there is none.
    """
    given = os.environ.get(purpose.variable, "") if secret is None else secret
    if not given and not address.is_local:
        raise ConfigError(
            f"{address} can be reached from other machines: pass secret=..., or set {purpose.variable}, to "
            f"the same value for {purpose.everybody}"
        )
    # Hashed, so that an empty one is a key, too, which the library wants.
    data = hashlib.sha256(f"zerostart {purpose.name} ".encode() + given.encode()).digest()
    return Key(data, purpose)


class Channel:
    """One connection; ``who`` is the other side in messages. Raises PeerError wherever that does not "
    "answer."""

    def __init__(self, connection: Connection, who: str, timeout: float) -> None:
        self.who = who
        self._connection = connection
        self._timeout = min(timeout, LONGEST)
        self._set_patience(self._timeout)

    def prove(self, key: Key, asking: bool) -> None:
        """Both sides prove that they know ``key``; one of them is ``asking`` first."""
        self._set_patience(HANDSHAKE)
        try:
            for ask in (asking, not asking):
                (deliver_challenge if ask else answer_challenge)(self._connection, key.data)
        except (EOFError, OSError) as error:
            self.close()
            raise PeerError(
                f"{self.who} ended the connection before it knew the secret of this {key.purpose.name}: it "
                "died, or is no zerostart"
            ) from error
        except (AuthenticationError, ValueError, AssertionError) as error:
            self.close()
            raise PeerError(
                f"{self.who} does not know the secret of this {key.purpose.name}, or is no zerostart: give "
                f"both sides the same secret, or the same {key.purpose.variable}"
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
        limit = self._timeout if timeout is None else min(timeout, LONGEST)
        try:
            if not self._connection.poll(limit):
                raise PeerError(f"{self.who} has not answered within {limit:.0f} s")
            head = load_json(self._connection.recv_bytes(MAX_BYTES), self.who, "message")
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
            # Nothing at all would be no limit.
            limit = struct.pack("ll", *divmod(max(1, int(seconds * 1e6)), 1_000_000))
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if raw.family == socket.AF_INET:
                for option, value in ALIVE.items():
                    raw.setsockopt(socket.IPPROTO_TCP, option, value)


def connect(
    address: Address, key: Key, timeout: float, wait: bool = True, patience: float | None = None
) -> Channel:
    """A channel with who listens at ``address``, or with ``wait`` will within ``timeout`` seconds.

    It waits for ``patience`` seconds for what the other one says; None: for as many. Raises PeerError.
    """
    listener = key.purpose.listener
    until = time.monotonic() + timeout
    while True:
        try:
            connection = _connected(address, min(max(0.1, until - time.monotonic()), LONGEST))
            break
        except OSError as error:
            if not wait or time.monotonic() > until:
                who = "no" + listener[listener.index(" ") :]
                raise PeerError(f"{who} listens at {address}: {error.strerror or error}") from error
            time.sleep(0.1)
    who = f"the{listener[listener.index(' ') :]} at {address}"
    channel = Channel(connection, who, timeout if patience is None else patience)
    channel.prove(key, asking=False)
    return channel


def _connected(address: Address, timeout: float) -> Connection:
    """The library's own has no time-out, and a host that is gone answers nothing for minutes."""
    if isinstance(address.place, str):
        raw = socket.socket(socket.AF_UNIX)
    else:
        raw = socket.socket(socket.AF_INET)
    try:
        raw.settimeout(timeout)
        raw.connect(address.place)
        raw.settimeout(None)
        return Connection(raw.detach())
    finally:
        raw.close()
