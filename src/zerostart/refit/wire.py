"""Control messages of a refit over a Unix socket, and calls of HTTP servers.

Both processes belong to one user on one machine, and ask the kernel for the user id of the other. A message
is one packet: its kind, the descriptor of an anonymous file with a JSON object, and optionally the descriptor
of the image. So a message arrives whole or not at all, and one deadline limits the wait.
"""

from __future__ import annotations

import json
import os
import re
import select
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
PROTOCOL = 4
#: Maximum length of the kind of a message, in bytes.
MAX_KIND_BYTES = 32
#: Seconds between two calls of ``check`` during a wait.
POLL_S = 0.25


class Message(NamedTuple):
    """A received message: kind, JSON object, and a file descriptor or -1."""

    kind: str
    body: dict[str, Any]
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
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
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
        raise ConfigError(f"cannot listen at unix://{path}: {error.strerror or error}") from error
    return listener, path


def _remove_socket(path: Path) -> None:
    """Delete an unused socket file; raise ConfigError if a process listens at it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise ConfigError(f"another process listens at unix://{path} already; choose another address")


def connect(path: Path, deadline: float) -> Channel:
    """Connect to the trainer at ``path``, retrying until ``deadline``; raise PeerError."""
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
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
    """Connection to a peer; its methods raise PeerError if the peer does not answer."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        """Wrap a socket; raise PeerError if ``peer`` belongs to another user.

        ``peer`` is its name in messages.
        """
        self.peer, self.closed = peer, False
        self._socket = connection
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, user, _ = struct.unpack("3i", credentials)
        if user != os.geteuid():
            self.close()
            raise PeerError(f"{peer} is a process of user {user}, and this one of user {os.geteuid()}")

    def send(self, kind: str, body: dict[str, Any], *descriptors: int, deadline: float) -> None:
        """Send a message, and possibly a file descriptor, before ``deadline``."""
        try:
            with os.fdopen(os.memfd_create("zerostart-message"), "w", encoding="utf-8") as file:
                json.dump(body, file)
                file.flush()
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                socket.send_fds(self._socket, [kind.encode()], [file.fileno(), *descriptors])
        except OSError as error:
            raise self._fail(error) from error

    def receive(self, *kinds: str, deadline: float, check: Callable[[], None] = lambda: None) -> Message:
        """Receive the next message, of one of ``kinds``, before ``deadline``.

        ``check`` is called every ``POLL_S`` seconds until a message begins. If it raises, the connection
        stays open.
        """
        while not self.waiting(min(POLL_S, max(0.0, deadline - time.monotonic()))):
            check()
            if time.monotonic() > deadline:
                raise self._fail(TimeoutError("it did not answer in time"))
        descriptors: list[int] = []
        try:
            kind, descriptors, *_ = socket.recv_fds(self._socket, MAX_KIND_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
            if kind.decode() not in kinds or not descriptors:
                raise ValueError(
                    f"it sent {kind!r}, expected {' or '.join(kinds)}" if kind else "it has ended"
                )
            with os.fdopen(descriptors.pop(0), encoding="utf-8") as file:
                file.seek(0)  # the sender's position is at the end
                body = dict(json.load(file))
        except (OSError, ValueError, TypeError) as error:
            for descriptor in descriptors:
                os.close(descriptor)
            raise self._fail(error) from error
        return Message(kind.decode(), body, *(descriptors or [-1]))

    def waiting(self, seconds: float = 0.0) -> bool:
        """Wait for a message or the end of the connection; False after ``seconds``."""
        return self.closed or self._poll(select.POLLIN, seconds)

    @property
    def is_lost(self) -> bool:
        """True if either side has closed the connection."""
        return self.closed or self._poll(select.POLLRDHUP, 0.0)

    def close(self) -> None:
        """Close the connection."""
        self.closed = True
        self._socket.close()

    def _poll(self, event: int, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._socket, event)
        return bool(poll.poll(1000 * seconds))

    def _fail(self, error: BaseException) -> PeerError:
        self.close()
        return PeerError(f"the connection with {self.peer} is lost: {error}")


@runtime_checkable
class Driver(Protocol):
    """Calls of an engine whose workers connect to rank 0.

    An engine that lives in the rank's process has a true attribute ``in_process``. An optional method
    ``served(version)`` is called when all workers have a version. An optional method ``worker()`` returns the
    ``Receiver`` of an only worker in the rank's process. The ranks then fill it directly and call only
    ``served``.
    """

    #: Number of workers that connect; None means those that have connected when ``join`` returns.
    workers: int | None

    def join(self, address: str, timeout: float) -> None:
        """Let the workers connect to ``address``; return when they have."""
        ...

    def follow(self, version: int) -> None:
        """Let each worker call ``Connection.follow``; return when all have."""
        ...

    def leave(self) -> None:
        """Let the workers close their connections; an error is logged."""
        ...


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Return None, which makes a redirect an error: a server must not choose other addresses."""


class Server:
    """HTTP server at ``http://HOST:PORT``; a failed request raises PeerError."""

    def __init__(self, address: str, missing: str = "") -> None:
        """Use ``missing`` as the remedy in errors about missing routes."""
        self.address, self._missing = address.rstrip("/"), missing

    def call(self, route: str, body: Mapping[str, Any] | None = None, timeout: float | None = None) -> Any:
        """Send a request, by POST if it has a ``body``; return the JSON answer.

        Within a push there is no ``timeout``: the push has its own, which ends the server's wait.
        """
        data = None if body is None else json.dumps(body).encode()
        url = f"{self.address}/{route}"
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.build_opener(_NoRedirects).open(request, timeout=timeout) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            is_missing = error.code == 404 and self._missing
            reason = self._missing if is_missing else error.read(2000).decode(errors="replace")
            raise PeerError(f"{url} answers {error.code}: {reason}") from None
        except OSError as error:
            raise PeerError(f"{url} does not answer: {error}") from error
        return json.loads(text) if text.startswith(b"{") else {}
