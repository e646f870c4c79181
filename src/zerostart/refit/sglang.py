"""SGLang as a place to which weights are pushed: its ``Engine``, or the address of its server.

Both have to be started with ``custom_weight_loader`` naming ``weight_loader``. SGLang calls that in each of
its workers for an ``update_weights_from_tensor`` whose ``load_format`` is its name, with the model and the
tensors that came. Here a tensor is empty, and its name says what to do: the weights come by the refit's
shared memory.
"""

from __future__ import annotations

import base64
import json
import logging
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerostart.errors import ConfigError, PeerError
from zerostart.refit.connection import worker_of
from zerostart.refit.drivers import Server
from zerostart.refit.receiver import Load, ModuleWeights, Stages
from zerostart.upstream.sglang import updating

logger = logging.getLogger("zerostart")
#: The name under which SGLang knows ``weight_loader``.
LOADER = "zerostart.serving.sglang_weight_loader"
#: Seconds to find out whether an address is that of a server of SGLang.
ANSWER_TIMEOUT_S = 20.0
_CALLS = ("update_weights_from_tensor", "begin_weight_update", "end_weight_update", "get_server_info")


def driver_of(target: object) -> SGLangDriver | None:
    """Return the driver of an SGLang engine; None for any other target."""
    if isinstance(target, str) and target.startswith(("http://", "https://")):
        server = Server(target)
        try:
            info = server.get("server_info", ANSWER_TIMEOUT_S)
        except (PeerError, ValueError):  # it may be anybody's
            return None
        known = info.keys() >= {"tp_size", "custom_weight_loader"}
        return SGLangDriver(_ServerCalls(server), info) if known else None
    if all(callable(getattr(target, name, None)) for name in _CALLS) and hasattr(target, "tokenizer_manager"):
        engine: Any = target
        # Asked here, in the thread that has the engine: its event loop belongs to whoever calls it first.
        driver = SGLangDriver(engine, engine.get_server_info())
        driver.in_process = True
        return driver
    return None


class SGLangDriver:
    """An SGLang engine, by its calls; no other thread may generate with an ``Engine`` meanwhile."""

    in_process = False

    def __init__(self, calls: Any, info: Mapping[str, Any]) -> None:
        """Raises ConfigError for an engine that cannot take weights."""
        self._calls = calls
        self._tensor_parallel = int(info["tp_size"])
        self.workers = self._tensor_parallel * int(info.get("pp_size") or 1)
        for wrong, why in (
            (
                LOADER not in (info.get("custom_weight_loader") or ()),
                f"does not know zerostart's loader: make it with custom_weight_loader=[{LOADER!r}], or start "
                f"its server with --custom-weight-loader {LOADER}",
            ),
            (
                int(info.get("dp_size") or 1) > 1,
                "has dp_size above 1, with which it updates no weights from tensors: start one server for "
                "each replica, and call zerostart.refit for each",
            ),
            (
                info.get("speculative_algorithm"),
                "has a draft model for speculative decoding, which would keep its weights: start it without",
            ),
            (
                info.get("quantization"),
                f"quantises its weights ({info.get('quantization')}), which no push has been tried with: "
                "start it without",
            ),
        ):
            if wrong:
                raise ConfigError(f"this SGLang {why}")

    def join(self, address: str, timeout: float) -> None:
        self._ask({"do": "join", "address": address, "timeout": timeout}, False)

    def follow(self, version: int) -> None:
        self._ask({"do": "follow", "version": version}, True)

    def served(self, version: int) -> None:
        """Have the engine say that it serves ``version``."""
        if isinstance(self._calls, _ServerCalls):
            _check(self._calls.update_weight_version(str(version)))
        else:
            updating.tell_version(self._calls, str(version))

    def leave(self) -> None:
        try:
            self._ask({"do": "leave"}, False)
        except Exception as error:  # of an engine that may be gone
            logger.warning("SGLang's workers have not left: %s", error)

    def _ask(self, what: Mapping[str, Any], flush: bool) -> None:
        calls = self._calls
        try:
            _check(calls.begin_weight_update(selector="target"))
        except PeerError:
            # A trainer that was killed in an update has not ended it.
            _check(calls.end_weight_update())
            _check(calls.begin_weight_update(selector="target"))
        try:
            tensors: Any = [(json.dumps(what), torch.zeros(0, device="cpu"))]
            if isinstance(calls, _ServerCalls):
                # SGLang's reader takes a pickle of text and an empty tensor.
                tensors = [base64.b64encode(pickle.dumps(tensors)).decode()] * self._tensor_parallel
            _check(calls.update_weights_from_tensor(tensors, load_format=LOADER, flush_cache=flush))
        finally:
            _check(calls.end_weight_update())


class _ServerCalls:
    """The calls of an ``Engine``, by the routes of a server."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def begin_weight_update(self, selector: str) -> object:
        return self._server.post("begin_weight_update", {"selector": selector})

    def update_weights_from_tensor(self, tensors: list[str], **options: Any) -> object:
        body = {"serialized_named_tensors": tensors, **options}
        return self._server.post("update_weights_from_tensor", body)

    def end_weight_update(self) -> object:
        return self._server.post("end_weight_update")

    def update_weight_version(self, version: str) -> object:
        body = {"new_version": version, "abort_all_requests": False}
        return self._server.post("update_weight_version", body)


def _check(answer: Any) -> None:
    """Raise PeerError if SGLang answers that a call has failed: a mapping by HTTP, else a pair."""
    if isinstance(answer, Mapping):
        answer = answer.get("success"), answer.get("message")
    if answer is not None and answer[0] is False:
        raise PeerError(f"SGLang answers: {answer[1]}")


# In a worker of SGLang.


class SGLangWeights(ModuleWeights):
    """A model in an SGLang worker, for ``Receiver``; SGLang unpacks and packs around an update."""

    def __init__(self, model: nn.Module) -> None:
        updating.require()
        load: Any = model
        super().__init__(model, load.load_weights, f"SGLang's {type(model).__name__}")

    @contextmanager
    def tracing(self) -> Iterator[tuple[Mapping[str, torch.Tensor], Load]]:
        with updating.nothing_derived(self._model), super().tracing() as found:
            yield found

    def stages(self, filled: Mapping[str, bool]) -> Stages:
        """Yield the whole model; then have it derive again what it derives from its weights."""
        yield nullcontext(self._tensors)
        with torch.no_grad():
            updating.derive(self._model)


def weight_loader(model: nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Do what the trainer asks of this worker, as ``custom_weight_loader`` of SGLang.

    Raises nothing, since SGLang ends where a loader raises: a failure is logged, and the worker's own
    connection tells the trainer.
    """
    for text, _ in named_tensors:
        try:
            asked = json.loads(text)
            rank = dist.get_rank() if dist.is_initialized() else 0
            worker = worker_of(model, SGLangWeights(model), f"sglang-{rank}")
            if asked["do"] == "join":
                worker.join(asked["address"], asked["timeout"])
            elif asked["do"] == "follow":
                worker.follow(asked["version"])
            else:
                worker.leave()
        except Exception as error:  # of a loader, the connection, the trainer
            logger.warning("%s: %s", type(error).__name__, error)
