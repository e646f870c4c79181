"""The routes of an engine's server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from zerostart.checkpoint.strict_json import JsonMapping
from zerostart.errors import PeerError


class Server:
    """A server at ``http://HOST:PORT``; raises PeerError for what it answers otherwise."""

    def __init__(self, address: str, missing: str = "") -> None:
        """``missing`` is what to do where it has not a route."""
        self.address = address.rstrip("/")
        self._missing = missing

    def post(
        self, route: str, body: JsonMapping | None = None, timeout: float | None = None
    ) -> dict[str, Any]:
        """Call a route that changes something.

        No time-out within a push: that has one itself, which ends what the route waits for.
        """
        return self._answer(route, json.dumps(body or {}).encode(), timeout)

    def get(self, route: str, timeout: float | None = None) -> dict[str, Any]:
        """Ask for something, within ``timeout`` seconds."""
        return self._answer(route, None, timeout)

    def _answer(self, route: str, data: bytes | None, timeout: float | None) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.address}/{route}", data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            if error.code == 404 and self._missing:
                raise PeerError(f"{self.address}/{route} answers 404: {self._missing}") from error
            said = error.read(2000).decode(errors="replace")
            raise PeerError(f"{self.address}/{route} answers {error.code}: {said}") from error
        except OSError as error:
            raise PeerError(f"{self.address}/{route} does not answer: {error}") from error
        return json.loads(text) if text.startswith(b"{") else {}
