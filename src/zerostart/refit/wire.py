"""The control wire of a refit: a Unix socket for processes of the own user on one machine.

Messages are JSON and bytes, never a pickle, and may carry one file descriptor. Both sides ask the system who
the other one is. Every wait has a deadline, for the whole message.
"""

from __future__ import annotations

import array
import json
import os
import re
import selectors
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from zerostart.errors import ConfigError, PeerError

#: Changes with the meaning of the messages.
PROTOCOL = 2
#: Maximum size of one message, in bytes.
MAX_MESSAGE_BYTES = 1 << 30
#: Seconds after which a waiting side looks again whether it has to go on waiting.
POLL_S = 0.25
#: Length of the head, number of its parts.
_LENGTHS = struct.Struct("!QQ")


class Message(NamedTuple):
    """A kind, a JSON object, bytes, and a file descriptor or -1."""

    kind: str
    body: dict[str, Any]
    parts: list[bytes]
    descriptor: int


def socket_path(target: str) -> Path:
    """Return the path of ``unix:///path``; raise ConfigError for any other address."""
    if match := re.fullmatch(r"unix:(?://)?(/.+)", target):
        return Path(match[1])
    raise ConfigError(
        f"{target.rpartition('@')[2]!r} is no address of a refit: pass unix:///path/of/a/socket, for workers "
        "on this machine. For other machines zerostart.weight_source gives whole tensors, which the engine's "
        "own weight transfer sends"
    )


def listen(path: Path | None) -> tuple[socket.socket, Path]:
    """Listen at ``path`` (None: in a new folder) for processes of the own user; raise ConfigError."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        if path is None:
            path = Path(tempfile.mkdtemp(prefix="zerostart-refit-")) / "workers"
        elif path.is_socket():
            _remove_socket(path)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        before = os.umask(0o177)  # the socket is never there for others
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ConfigError(f"nobody can listen at unix://{path}: {error.strerror or error}") from error
    return listener, path


def _remove_socket(path: Path) -> None:
    """Remove a socket that nobody listens at; raise ConfigError if somebody does."""
    with socket.socket(socket.AF_UNIX) as trial:
        try:
            trial.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise ConfigError(f"another process listens at unix://{path} already; choose another address")


def connect(path: Path, deadline: float) -> Channel:
    """Connect with the trainer that listens at ``path``, or will before ``deadline``; raise PeerError."""
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            connection.connect(str(path))
            return Channel(connection, f"the trainer at unix://{path}")
        except OSError as error:
            connection.close()
            if time.monotonic() > deadline:
                raise PeerError(f"no trainer listens at unix://{path}: {error.strerror or error}") from error
            time.sleep(0.1)


class Channel:
    """One connection; ``who`` is the other side in messages. Raises PeerError if that does not answer."""

    def __init__(self, connection: socket.socket, who: str) -> None:
        """Raise PeerError if the other side is not a process of the own user."""
        self.who, self.closed = who, False
        self._socket = connection
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, user, _ = struct.unpack("3i", credentials)
        if user != os.geteuid():
            self.close()
            raise PeerError(f"{who} is a process of user {user}, and this one of user {os.geteuid()}")

    def send(
        self, kind: str, body: dict[str, Any], *parts: bytes, deadline: float, descriptor: int = -1
    ) -> None:
        """Send a message before ``deadline``."""
        head = json.dumps({"kind": kind, "body": body, "parts": [len(part) for part in parts]}).encode()
        data = memoryview(b"".join([_LENGTHS.pack(len(head), sum(map(len, parts))), head, *parts]))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        try:
            while data:
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                sent = self._socket.sendmsg([data], rights if descriptor >= 0 else [])
                data, descriptor = data[sent:], -1
        except OSError as error:
            raise self._lost(error) from error

    def receive(self, *kinds: str, deadline: float, check: Callable[[], None] = lambda: None) -> Message:
        """Receive the next message, one of ``kinds``, before ``deadline``.

        Until it begins ``check`` is called now and then; an error of it leaves the connection as it is.
        """
        while not self.waiting(min(POLL_S, max(0.0, deadline - time.monotonic()))):
            check()
            if time.monotonic() > deadline:
                raise self._lost(TimeoutError("it has not answered in time"))
        descriptors: list[int] = []
        try:
            head, rest = _LENGTHS.unpack(self._read(_LENGTHS.size, deadline, descriptors))
            if head + rest > MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of {head + rest} bytes")
            said = json.loads(self._read(head, deadline, descriptors))
            kind, body, sizes = str(said["kind"]), dict(said["body"]), said["parts"]
            parts = [self._read(int(size), deadline, descriptors) for size in sizes]
        except (OSError, ValueError, KeyError, TypeError) as error:
            _close_all(descriptors)
            raise self._lost(error) from error
        if kind not in kinds:
            _close_all(descriptors)
            raise self._lost(ValueError(f"it said {kind!r:.40} where {' or '.join(kinds)} was expected"))
        return Message(kind, body, parts, descriptors[0] if descriptors else -1)

    def waiting(self, seconds: float = 0.0) -> bool:
        """Return whether a message, or the end of the connection, is there."""
        if self.closed:
            return True
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            return bool(selector.select(seconds))

    def close(self) -> None:
        """Close the connection."""
        self.closed = True
        self._socket.close()

    def _read(self, count: int, deadline: float, descriptors: list[int]) -> bytes:
        if count < 0 or count > MAX_MESSAGE_BYTES:
            raise ValueError(f"a part of {count} bytes")
        data = bytearray()
        while len(data) < count:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            part, found, *_ = socket.recv_fds(
                self._socket, min(count - len(data), 1 << 20), 1, socket.MSG_CMSG_CLOEXEC
            )
            descriptors += found
            if not part:
                raise OSError("it ended the connection")
            data += part
        return bytes(data)

    def _lost(self, error: BaseException) -> PeerError:
        self.close()  # half a message cannot be continued
        return PeerError(f"the connection with {self.who} is lost: {error}")


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
