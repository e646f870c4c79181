"""Push weights into SGLang: its ``Engine``, or its server.

Both must be started with ``custom_weight_loader`` naming ``weight_loader``. SGLang calls that in each worker
for an ``update_weights_from_tensor`` with this ``load_format``. The tensor in the call is empty, and its name
is a command. The weights come through the shared memory of the refit.
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
from zerostart.refit.connection import get_worker
from zerostart.refit.receiver import Load, ModuleWeights, Stages
from zerostart.refit.wire import Server
from zerostart.upstream.sglang import updating

logger = logging.getLogger("zerostart")
#: Name of ``weight_loader`` for SGLang.
LOADER = "zerostart.serving.sglang_weight_loader"
#: Seconds to wait for an answer about the server's kind.
ANSWER_TIMEOUT_S = 20.0
_CALLS = ("update_weights_from_tensor", "begin_weight_update", "end_weight_update", "get_server_info")


def driver_of(target: object) -> SGLangDriver | None:
    """Return the driver of an SGLang engine; None for any other target."""
    if isinstance(target, str) and target.startswith(("http://", "https://")):
        server = Server(target)
        try:
            info = server.call("server_info", timeout=ANSWER_TIMEOUT_S)
        except (PeerError, ValueError):  # another server
            return None
        is_sglang = info.keys() >= {"tp_size", "custom_weight_loader"}
        return SGLangDriver(server, None, info) if is_sglang else None
    if all(callable(getattr(target, name, None)) for name in _CALLS) and hasattr(target, "tokenizer_manager"):
        engine: Any = target
        # Ask in this thread: the engine's event loop belongs to the first thread that calls it.
        return SGLangDriver(None, engine, engine.get_server_info())
    return None


class SGLangDriver:
    """Driver of an SGLang server, or of an ``Engine`` that is idle meanwhile."""

    def __init__(self, server: Server | None, engine: Any, info: Mapping[str, Any]) -> None:
        """Raise ConfigError for an engine that cannot load pushed weights."""
        self._server, self._engine, self.in_process = server, engine, server is None
        self._tensor_parallel = int(info["tp_size"])
        self.workers: int | None = self._tensor_parallel * int(info.get("pp_size") or 1)
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
        self._send_command({"do": "join", "address": address, "timeout": timeout}, False)

    def follow(self, version: int) -> None:
        self._send_command({"do": "follow", "version": version}, True)

    def served(self, version: int) -> None:
        """Set the engine's weight version."""
        if self._server is None:
            updating.set_version(self._engine, str(version))
        else:
            self._call("update_weight_version", new_version=str(version), abort_all_requests=False)

    def leave(self) -> None:
        self._send_command({"do": "leave"}, False)

    def _send_command(self, command: Mapping[str, Any], flush: bool) -> None:
        try:
            self._call("begin_weight_update", selector="target")
        except PeerError:
            # End the update of a trainer that was killed.
            self._call("end_weight_update")
            self._call("begin_weight_update", selector="target")
        try:
            tensors = [(json.dumps(command), torch.zeros(0, device="cpu"))]
            arguments: dict[str, Any] = {"named_tensors": tensors}
            if self._server is not None:
                # SGLang's reader takes a pickle of text and an empty tensor.
                data = base64.b64encode(pickle.dumps(tensors)).decode()
                arguments = {"serialized_named_tensors": [data] * self._tensor_parallel}
            self._call("update_weights_from_tensor", **arguments, load_format=LOADER, flush_cache=flush)
        finally:
            self._call("end_weight_update")

    def _call(self, name: str, **body: Any) -> None:
        """Call SGLang; raise PeerError if it reports a failure."""
        if self._server is not None:
            answer = self._server.call(name, body)
            success, reason = answer.get("success"), answer.get("message")
        else:
            success, reason = (getattr(self._engine, name)(**body) or (None, ""))[:2]
        if success is False:
            raise PeerError(f"SGLang answers: {reason}")


# In SGLang's workers.


class SGLangWeights(ModuleWeights):
    """Weights of a model in an SGLang worker; SGLang packs them after an update."""

    def __init__(self, model: nn.Module) -> None:
        updating.require_version()
        load: Any = model
        super().__init__(model, load.load_weights, f"SGLang's {type(model).__name__}")

    @contextmanager
    def tracing(self) -> Iterator[tuple[Mapping[str, torch.Tensor], Load]]:
        with updating.skip_derived(self._model), super().tracing() as traced:
            yield traced

    def stages(self, filled: Mapping[str, bool]) -> Stages:
        """Yield the whole model, then let it recompute tensors that depend on its weights."""
        yield nullcontext(self._tensors)
        with torch.no_grad():
            updating.update_derived(self._model)


def weight_loader(model: nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Run a command of the trainer in this worker, as SGLang's ``custom_weight_loader``.

    Raises nothing, because SGLang exits if a loader raises. A failure is logged, and the worker's connection
    reports it to the trainer.
    """
    for text, _ in named_tensors:
        try:
            command = json.loads(text)
            rank = dist.get_rank() if dist.is_initialized() else 0
            worker = get_worker(model, SGLangWeights(model), f"sglang-{rank}")
            if command["do"] == "join":
                worker.join(command["address"], command["timeout"])
            elif command["do"] == "follow":
                worker.follow(command["version"])
            else:
                worker.leave()
        except Exception as error:  # the loader, the connection or the trainer
            logger.warning("%s: %s", type(error).__name__, error)
