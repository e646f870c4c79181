"""On the trainer's rank 0: having SGLang's workers connect, and telling them of each push.

A target is SGLang's ``Engine`` in this process, or the address of its server (``http://...``). Both have to
be started with ``custom_weight_loader`` naming ours.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

import torch

from zerostart.checkpoint.strict_json import JsonMapping
from zerostart.errors import ConfigError, PeerError
from zerostart.integrations.http import Server
from zerostart.integrations.sglang.worker import LOADER
from zerostart.upstream.sglang import updating

#: Seconds to find out whether an address is that of a server of SGLang.
LOOK = 20.0
#: What it tells of itself.
_TOLD = {"tp_size", "custom_weight_loader"}
_CALLS = ("update_weights_from_tensor", "begin_weight_update", "end_weight_update", "get_server_info")


def driver_of(target: object) -> SGLangDriver | None:
    """The driver of an SGLang engine; None for any other target."""
    if isinstance(target, str) and target.startswith(("http://", "https://")):
        server = Server(target)
        try:
            info = server.get("server_info", LOOK)
        except (PeerError, ValueError):  # it may be anybody's
            return None
        # Outside: what is wrong with an SGLang is told, by an error that is a ValueError, too.
        return SGLangDriver(_Server(server), info) if info.keys() >= _TOLD else None
    if all(callable(getattr(target, name, None)) for name in _CALLS) and hasattr(target, "tokenizer_manager"):
        engine: Any = target
        # Asked here, in the thread that has the engine: its event loop belongs to whoever calls it first.
        driver = SGLangDriver(_Engine(engine), engine.get_server_info())
        driver.in_process = True
        return driver
    return None


class _Calls(Protocol):
    """What is asked of SGLang."""

    def begin(self) -> None: ...

    def update(self, text: str, copies: int, flush: bool) -> None: ...

    def end(self) -> None: ...

    def tell_version(self, version: str) -> None: ...


class SGLangDriver:
    """An SGLang engine, by its calls."""

    in_process = False

    def __init__(self, calls: _Calls, info: Mapping[str, Any]) -> None:
        """Raises ConfigError for an engine that cannot take weights."""
        self._calls = calls
        self._tensor_parallel = int(info["tp_size"])
        self.workers = self._tensor_parallel * int(info.get("pp_size") or 1)
        if LOADER not in (info.get("custom_weight_loader") or ()):
            raise ConfigError(
                "this SGLang does not know zerostart's loader: make it with "
                f"custom_weight_loader=[{LOADER!r}], or start its server with --custom-weight-loader {LOADER}"
            )
        if int(info.get("dp_size") or 1) > 1:
            raise ConfigError(
                "SGLang updates no weights from tensors with dp_size above 1: start one server for each "
                "replica, and call zerostart.refit for each"
            )
        if info.get("speculative_algorithm"):
            raise ConfigError(
                "this SGLang has a draft model for speculative decoding, which would keep its weights: start "
                "it without one"
            )
        if info.get("quantization"):
            raise ConfigError(
                f"this SGLang quantises its weights ({info['quantization']}), which no push has been tried "
                "with: start it without"
            )

    def join(self, how: JsonMapping) -> None:
        """Have the workers connect."""
        self._ask({"do": "join", **{key: how[key] for key in ("address", "secret", "timeout")}}, False)

    def follow(self, version: int) -> None:
        """Have the workers take part in a push; what the engine has cached of prompts is dropped."""
        self._ask({"do": "follow", "version": version}, True)

    def served(self, version: int) -> None:
        """Have the engine say that it serves ``version``."""
        self._calls.tell_version(str(version))

    def leave(self) -> None:
        """Have the workers close their connections."""
        with suppress(Exception):
            self._ask({"do": "leave"}, False)

    def _ask(self, what: JsonMapping, flush: bool) -> None:
        try:
            self._calls.begin()
        except PeerError:
            # A trainer that was killed in an update has not ended it.
            self._calls.end()
            self._calls.begin()
        try:
            self._calls.update(json.dumps(what), self._tensor_parallel, flush)
        finally:
            self._calls.end()


def _payload(text: str) -> list[tuple[str, torch.Tensor]]:
    return [(text, torch.zeros(0, device="cpu"))]


class _Server:
    """By the routes of its server."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def begin(self) -> None:
        _check(self._server.post("begin_weight_update", {"selector": "target"}))

    def update(self, text: str, copies: int, flush: bool) -> None:
        # Pickled as torch's own, which SGLang's reader takes, and nothing but text and an empty tensor.
        data = base64.b64encode(pickle.dumps(_payload(text))).decode()
        body = {"serialized_named_tensors": [data] * copies, "load_format": LOADER, "flush_cache": flush}
        _check(self._server.post("update_weights_from_tensor", body))

    def end(self) -> None:
        _check(self._server.post("end_weight_update"))

    def tell_version(self, version: str) -> None:
        body = {"new_version": version, "abort_all_requests": False}
        _check(self._server.post("update_weight_version", body))


class _Engine:
    """By the methods of an ``Engine``; not while another thread generates with it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def begin(self) -> None:
        _check(self._engine.begin_weight_update(selector="target"))

    def update(self, text: str, copies: int, flush: bool) -> None:
        _check(self._engine.update_weights_from_tensor(_payload(text), load_format=LOADER, flush_cache=flush))

    def end(self) -> None:
        _check(self._engine.end_weight_update())

    def tell_version(self, version: str) -> None:
        updating.tell_version(self._engine, version)


def _check(answer: Any) -> None:
    """Raise PeerError where SGLang answers that a call has failed: a mapping by HTTP, else a pair."""
    if isinstance(answer, Mapping):
        answer = answer.get("success"), answer.get("message")
    if answer[0] is False:
        raise PeerError(f"SGLang answers: {answer[1]}")
