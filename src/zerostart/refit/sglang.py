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
from zerostart.refit.receiver import Load, ModuleWeights, Stages
from zerostart.refit.wire import Server
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
            info = server.call("server_info", timeout=ANSWER_TIMEOUT_S)
        except (PeerError, ValueError):  # it may be anybody's
            return None
        known = info.keys() >= {"tp_size", "custom_weight_loader"}
        return SGLangDriver(server, None, info) if known else None
    if all(callable(getattr(target, name, None)) for name in _CALLS) and hasattr(target, "tokenizer_manager"):
        engine: Any = target
        # Asked here, in the thread that has the engine: its event loop belongs to whoever calls it first.
        return SGLangDriver(None, engine, engine.get_server_info())
    return None


class SGLangDriver:
    """An SGLang server, or an ``Engine`` with which no other thread may generate meanwhile."""

    def __init__(self, server: Server | None, engine: Any, info: Mapping[str, Any]) -> None:
        """Raises ConfigError for an engine that cannot take weights."""
        self._server, self._engine, self.in_process = server, engine, server is None
        self._tensor_parallel = int(info["tp_size"])
        self.workers = self._tensor_parallel * int(info.get("pp_size") or 1)
        if LOADER not in (info.get("custom_weight_loader") or ()):
            raise ConfigError(
                "this SGLang does not know zerostart's loader: make it with "
                f"custom_weight_loader=[{LOADER!r}], or start its server with --custom-weight-loader {LOADER}"
            )
        replicas = int(info.get("dp_size") or 1)
        refused = {name: info[name] for name in ("speculative_algorithm", "quantization") if info.get(name)}
        if replicas > 1 or refused:
            raise ConfigError(
                f"this SGLang has dp_size={replicas} and {refused or 'no draft model'}: start it without "
                "speculative decoding and quantization, and one server for each replica"
            )

    def join(self, address: str, timeout: float) -> None:
        self._ask({"do": "join", "address": address, "timeout": timeout}, False)

    def follow(self, version: int) -> None:
        self._ask({"do": "follow", "version": version}, True)

    def served(self, version: int) -> None:
        """Have the engine say that it serves ``version``."""
        if self._server is None:
            updating.tell_version(self._engine, str(version))
        else:
            self._call("update_weight_version", new_version=str(version), abort_all_requests=False)

    def leave(self) -> None:
        try:
            self._ask({"do": "leave"}, False)
        except Exception as error:  # of an engine that may be gone
            logger.warning("SGLang's workers have not left: %s", error)

    def _ask(self, what: Mapping[str, Any], flush: bool) -> None:
        try:
            self._call("begin_weight_update", selector="target")
        except PeerError:
            # A trainer that was killed in an update has not ended it.
            self._call("end_weight_update")
            self._call("begin_weight_update", selector="target")
        try:
            tensors = [(json.dumps(what), torch.zeros(0, device="cpu"))]
            given: dict[str, Any] = {"named_tensors": tensors}
            if self._server is not None:
                # SGLang's reader takes a pickle of text and an empty tensor.
                data = base64.b64encode(pickle.dumps(tensors)).decode()
                given = {"serialized_named_tensors": [data] * self._tensor_parallel}
            self._call("update_weights_from_tensor", **given, load_format=LOADER, flush_cache=flush)
        finally:
            self._call("end_weight_update")

    def _call(self, name: str, **body: Any) -> None:
        """Call SGLang; raise PeerError if it answers that this has failed."""
        if self._server is not None:
            answer = self._server.call(name, body)
            success, why = answer.get("success"), answer.get("message")
        else:
            success, why = (getattr(self._engine, name)(**body) or (None, ""))[:2]
        if success is False:
            raise PeerError(f"SGLang answers: {why}")


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
