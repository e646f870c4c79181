"""Exchange control messages of a refit over a Unix socket, and call the engines that take part.

Both processes belong to one user on one machine, and ask the kernel for the user id of the other. A message
contains JSON and bytes, never a pickle, and may pass one file descriptor. Every send and receive has one
deadline for the whole message.
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
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from zerostart.errors import ConfigError, PeerError

#: Version of the message format; trainer and worker must have the same.
PROTOCOL = 2
#: Maximum size of one message, in bytes.
MAX_MESSAGE_BYTES = 1 << 30
#: Seconds between two calls of ``check`` while a side waits for a message.
POLL_S = 0.25
#: Prefix of a message: length of its JSON header and of all its parts, in bytes.
_LENGTHS = struct.Struct("!QQ")


class Message(NamedTuple):
    """A received message: kind, JSON object, byte strings, and a file descriptor or -1."""

    kind: str
    body: dict[str, Any]
    parts: list[bytes]
    descriptor: int


def socket_path(target: str) -> Path:
    """Return the path of ``unix:///path``; raise ConfigError for any other address."""
    if match := re.fullmatch(r"unix:(?://)?(/.+)", target):
        return Path(match[1])
    raise ConfigError(
        f"{target.rpartition('@')[2]!r} is no address of a refit: pass unix:///path/of/a/socket for "
        "workers on this machine. For other machines, send the tensors of zerostart.weight_source with "
        "the engine's own weight transfer"
    )


def listen(path: Path | None) -> tuple[socket.socket, Path]:
    """Listen at ``path``, or in a new folder if None; raise ConfigError.

    Only processes of the same user can connect.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        if path is None:
            path = Path(tempfile.mkdtemp(prefix="zerostart-refit-")) / "workers"
        elif path.is_socket():
            _remove_socket(path)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        old_umask = os.umask(0o177)  # create the socket with mode 0600
        try:
            listener.bind(str(path))
        finally:
            os.umask(old_umask)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ConfigError(f"nobody can listen at unix://{path}: {error.strerror or error}") from error
    return listener, path


def _remove_socket(path: Path) -> None:
    """Delete an unused socket file; raise ConfigError if a process listens at it."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise ConfigError(f"another process listens at unix://{path} already; choose another address")


def connect(path: Path, deadline: float) -> Channel:
    """Connect to the trainer at ``path``, retrying until ``deadline``; raise PeerError."""
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
    """A connection to a peer, which error messages call ``who``.

    Its methods raise PeerError if the peer does not answer.
    """

    def __init__(self, connection: socket.socket, who: str) -> None:
        """Raise PeerError if the peer is a process of another user."""
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
        header = json.dumps({"kind": kind, "body": body, "parts": [len(part) for part in parts]}).encode()
        data = memoryview(b"".join([_LENGTHS.pack(len(header), sum(map(len, parts))), header, *parts]))
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        try:
            while data:
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                sent = self._socket.sendmsg([data], ancillary if descriptor >= 0 else [])
                data, descriptor = data[sent:], -1
        except OSError as error:
            raise self._fail(error) from error

    def receive(self, *kinds: str, deadline: float, check: Callable[[], None] = lambda: None) -> Message:
        """Receive the next message, of one of ``kinds``, before ``deadline``.

        Until the message begins, ``check`` is called every ``POLL_S`` seconds. If ``check`` raises, the
        connection stays open.
        """
        while not self.waiting(min(POLL_S, max(0.0, deadline - time.monotonic()))):
            check()
            if time.monotonic() > deadline:
                raise self._fail(TimeoutError("it did not answer in time"))
        descriptors: list[int] = []
        try:
            header_size, part_size = _LENGTHS.unpack(self._read(_LENGTHS.size, deadline, descriptors))
            if header_size + part_size > MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of {header_size + part_size} bytes is too long")
            header = json.loads(self._read(header_size, deadline, descriptors))
            kind, body, sizes = str(header["kind"]), dict(header["body"]), header["parts"]
            parts = [self._read(int(size), deadline, descriptors) for size in sizes]
        except (OSError, ValueError, KeyError, TypeError) as error:
            _close_all(descriptors)
            raise self._fail(error) from error
        if kind not in kinds:
            _close_all(descriptors)
            raise self._fail(ValueError(f"it sent {kind!r:.40}, expected {' or '.join(kinds)}"))
        return Message(kind, body, parts, descriptors[0] if descriptors else -1)

    def waiting(self, seconds: float = 0.0) -> bool:
        """Wait for a message or the end of the connection; False after ``seconds``."""
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
            raise ValueError(f"a part of {count} bytes is out of range")
        data = bytearray()
        while len(data) < count:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            part, found, *_ = socket.recv_fds(
                self._socket, min(count - len(data), 1 << 20), 1, socket.MSG_CMSG_CLOEXEC
            )
            descriptors += found
            if not part:
                raise OSError("it closed the connection")
            data += part
        return bytes(data)

    def _fail(self, error: BaseException) -> PeerError:
        self.close()  # the rest of an incomplete message cannot be read later
        return PeerError(f"the connection with {self.who} is lost: {error}")


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


@runtime_checkable
class Driver(Protocol):
    """An engine whose workers have to be told when to connect, and when a push begins, by rank 0.

    An engine that lives in the rank that it was given to has a true attribute ``in_process``. A method
    ``served(version)``, if there is one, is called when all workers have a version. If a method ``worker()``
    gives a ``Receiver``, of the one worker, which is in the rank's own process, the ranks fill that, and only
    ``served`` is called.
    """

    #: Number of workers that connect.
    workers: int

    def join(self, address: str, timeout: float) -> None:
        """Have the workers connect with ``address``, and return when they have."""
        ...

    def follow(self, version: int) -> None:
        """Have each worker call ``Connection.follow``, and return when all have."""
        ...

    def leave(self) -> None:
        """Have the workers close their connections; raise nothing."""
        ...


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Turns a redirect into an error: a server does not choose the addresses that zerostart asks."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Server:
    """A server at ``http://HOST:PORT``; raises PeerError for any answer but success."""

    def __init__(self, address: str, missing: str = "") -> None:
        """``missing`` says what to do if a route is missing."""
        self.address = address.rstrip("/")
        self._missing = missing
        self._opener = urllib.request.build_opener(_Redirects)

    def call(self, route: str, body: Mapping[str, Any] | None = None, timeout: float | None = None) -> Any:
        """Post ``body``, or ask for something without one.

        No timeout within a push, which has one and ends what the route waits for.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.address}/{route}", data, {"Content-Type": "application/json"}
        )
        try:
            with self._opener.open(request, timeout=timeout) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            if error.code == 404 and self._missing:
                raise PeerError(f"{self.address}/{route} answers 404: {self._missing}") from None
            said = error.read(2000).decode(errors="replace")
            raise PeerError(f"{self.address}/{route} answers {error.code}: {said}") from None
        except OSError as error:
            raise PeerError(f"{self.address}/{route} does not answer: {error}") from error
        return json.loads(text) if text.startswith(b"{") else {}
