"""Engines that are told of a refit and of its pushes, known by the calls that they have."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from zerostart.errors import PeerError


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
