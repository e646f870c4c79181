"""Push weights into vLLM: its ``LLM``, or its server (``http://...``).

vLLM packs the weights of a layer after a load, and keeps unpacked parameters for later loads. A push traces
the loader with these, fills one layer at a time, and lets vLLM pack it into the memory of its old weights.
Only one layer is in memory twice.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerostart.errors import ConfigError, PeerError
from zerostart.refit.connection import EngineWorker, get_worker
from zerostart.refit.receiver import Load, Receiver, Stages
from zerostart.refit.wire import Server
from zerostart.upstream.vllm import reload
from zerostart.upstream.vllm.reload import Layer

logger = logging.getLogger("zerostart")
#: Name of the engine in vLLM's configuration.
BACKEND = "zerostart"
#: Timeout of requests that are answered at once, in seconds.
ANSWER_TIMEOUT_S = 60.0
_CONFIG = f'{{"backend": "{BACKEND}"}}'


def register() -> None:
    """Register both sides of the engine with vLLM in this process; vLLM imports them on first use."""
    from vllm.distributed import weight_transfer

    for side, engine in (("Engine", "WeightTransfer"), ("Trainer", "TrainerTransfer")):
        factory = getattr(weight_transfer, f"WeightTransfer{side}Factory")
        try:
            factory.register_engine(BACKEND, "zerostart.refit.vllm_engine", engine)
        except ValueError as error:  # vLLM runs plugins more than once in a process
            logger.debug("%s", error)


def driver_of(target: object) -> VLLMDriver | None:
    """Return the driver of a vLLM engine; None for any other target."""
    if isinstance(target, str) and target.startswith(("http://", "https://")):
        return VLLMDriver(target)
    if hasattr(target, "init_weight_transfer_engine") and hasattr(target, "llm_engine"):
        return EngineDriver(target)
    return None


class VLLMDriver:
    """Driver of a vLLM server."""

    #: Those that have connected when ``join`` returns.
    workers: int | None = None

    def __init__(self, address: str) -> None:
        remedy = f"start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config '{_CONFIG}'"
        self._server = Server(address, remedy)

    def join(self, address: str, timeout: float) -> None:
        self._call("init_weight_transfer_engine", init_info={"address": address, "timeout": timeout})

    def follow(self, version: int) -> None:
        self._call("start_weight_update")
        finished = ""
        try:
            self._call("update_weights", update_info={"version": version})
            finished = str(version)
        finally:  # some workers may still be in the update
            self._call("finish_weight_update", weight_version=finished)

    def served(self, version: int) -> None:
        """Reset the prefix cache; raise PeerError if running requests prevent it."""
        answer = self._call("reset_prefix_cache")
        if (answer.get("success") if isinstance(answer, dict) else answer) is False:
            raise PeerError(
                "vLLM cannot reset its prefix cache of the old version while requests are running: wait for "
                "them or pause generation, then push again"
            )

    def leave(self) -> None:
        self._call("shutdown_weight_transfer_engine")

    def _call(self, name: str, **body: Any) -> Any:
        timeout = ANSWER_TIMEOUT_S if name.startswith("shutdown") else None
        return self._server.call(name, body, timeout)


class ClientDriver(VLLMDriver):
    """Driver of the vLLM behind a ``VLLMWeightSyncClient``."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def served(self, version: int) -> None:
        """Do nothing: vLLM's trainer side leaves the prefix cache to its caller."""

    def _call(self, name: str, **body: Any) -> Any:
        return getattr(self._client, name)(*body.values())


class EngineDriver(VLLMDriver):
    """Driver of an ``LLM`` in this process, with workers in any process."""

    in_process = True

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        config = engine.llm_engine.vllm_config
        parallel, transfer = config.parallel_config, config.weight_transfer_config
        # With the external launcher each process has its own LLM with one worker.
        is_external = parallel.distributed_executor_backend == "external_launcher"
        self.workers = 1 if is_external else int(parallel.world_size_across_dp)
        self._is_configured = transfer is not None and transfer.backend == BACKEND

    def join(self, address: str, timeout: float) -> None:
        if not self._is_configured:
            raise ConfigError(
                "the workers of this LLM are other processes without zerostart's engine: create it with "
                f"weight_transfer_config={_CONFIG}"
            )
        super().join(address, timeout)

    def served(self, version: int) -> None:
        """Set the engine's weight version, and reset the prefix cache."""
        tell = getattr(self._engine.llm_engine, "set_weight_version", None)  # newer releases have it
        if tell is not None:
            tell(str(version))
        super().served(version)

    def worker(self) -> Receiver | None:
        """Return the only worker, if it runs in this process."""
        if self.workers != 1:
            return None
        try:
            rpc = self._engine.collective_rpc
            receivers: list[Receiver | None] = rpc(receiver, kwargs={"process": os.getpid()})
        except TypeError as error:  # vLLM cannot send functions to other processes
            logger.debug("%s", error)
            return None
        return receivers[0]

    def leave(self) -> None:
        if self._is_configured:
            super().leave()

    def _call(self, name: str, **body: Any) -> Any:
        call = getattr(self._engine, name)
        if "weight_version" in body:
            return call(body["weight_version"])
        return call(body) if body else call()


# In vLLM's workers.


def engine_worker(model: nn.Module, config: Any, rank: int) -> EngineWorker:
    """Return the worker of a model, created at the first call."""
    weights = VLLMWeights(model, config, f"vLLM's {type(model).__name__}")
    return get_worker(model, weights, f"vllm-{rank}")


def receiver(worker: Any, process: int) -> Receiver | None:
    """Return the receiver of vLLM's ``worker``, if it runs in ``process``."""
    own = engine_worker(worker.model_runner.get_model(), worker.vllm_config, int(worker.rank))
    return own.receiver if os.getpid() == process else None


@dataclass
class JoinInfo:
    """Arguments of ``init_weight_transfer_engine``."""

    address: str
    timeout: float = 300.0


@dataclass
class PushInfo:
    """Arguments of ``update_weights``."""

    version: int


class VLLMWeights:
    """Weights of a model in a vLLM worker, for ``Receiver``."""

    def __init__(self, model: nn.Module, config: Any, name: str) -> None:
        reload.require_version()
        #: Name in messages.
        self.name = name
        self._model: Any = model
        #: vLLM's ``VllmConfig``, which must be active while layers are created or packed.
        self._config = config

    @contextmanager
    def tracing(self) -> Iterator[tuple[Mapping[str, torch.Tensor], Load]]:
        with self._configured(), reload.on_meta(self._model) as tensors:
            yield tensors, self._model.load_weights

    def may_keep(self, name: str) -> bool:
        """Allow tied parameters, and all parameters of a quantised model."""
        return name in reload.tied(self._model) or self._config.model_config.quantization is not None

    def stages(self, filled: Mapping[str, bool]) -> Stages:
        """Yield a context manager for each layer to fill; its exit packs the layer."""
        with self._configured(), torch.no_grad():
            written: set[int] = set()
            unfilled: list[Layer] = []
            for prefix, layer in reload.layers_of(self._model):
                own = layer.tensors()
                wanted = {name: filled[prefix + name] for name in own if prefix + name in filled}
                if wanted:
                    written.update(id(own[name]) for name in wanted)
                    yield _stage(prefix, layer, wanted)
                else:
                    unfilled.append(layer)
            # A head that is tied to the embedding is not filled, but vLLM may pack it separately.
            for layer in unfilled:
                if layer.packed and any(id(tensor) in written for tensor in layer.tensors().values()):
                    layer.pack_in_place()
            reload.finish_attention(self._model, self._config.model_config.dtype)

    def _configured(self) -> AbstractContextManager[object]:
        from vllm.config import set_current_vllm_config

        configured: AbstractContextManager[object] = set_current_vllm_config(self._config)
        return configured


@contextmanager
def _stage(prefix: str, layer: Layer, wanted: Mapping[str, bool]) -> Iterator[Mapping[str, torch.Tensor]]:
    """Yield the ``wanted`` tensors of one layer, then pack it.

    ``wanted`` maps a name to True if every element will be filled.
    """
    if not layer.packed:
        yield {prefix + name: layer.tensors()[name].data for name in wanted}
        return
    cast = reload.cast_biases(layer)
    layer.to_meta()
    try:
        before = layer.materialise()
        tensors = {}
        for name, tensor in layer.tensors().items():
            # Unfilled elements, such as buffers and padding of the vocabulary, keep their values. If the old
            # tensor has another shape, they are padding, which vLLM fills with zeros.
            if tensor is not before.get(name) and not wanted.get(name, False):
                old = before.get(name)
                fits = old is not None and (old.shape, old.dtype) == (tensor.shape, tensor.dtype)
                tensor.data.copy_(old.data) if fits and old is not None else tensor.data.zero_()
            if name in wanted:
                tensors[name] = tensor.data
                if name in cast:
                    tensors[name] = tensor.data.to(layer.module.params_dtype)
        yield {prefix + name: tensor for name, tensor in tensors.items()}
        for name in set(cast) & tensors.keys():
            layer.tensors()[name].data.copy_(tensors[name])
        layer.pack()
    except BaseException:
        layer.put_back()
        raise
