"""vLLM as a place to which weights are pushed: its ``LLM``, or the address of its server (``http://...``).

In a worker vLLM packs the weights of a layer after a load. So the loader is traced, and layers are filled,
with the parameters that vLLM keeps for loads that come later; then each layer is packed by vLLM, into the
memory that the packed weights had before. One layer at a time is in memory twice.
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
from zerostart.refit.connection import EngineWorker, worker_of
from zerostart.refit.receiver import Load, Receiver, Stages
from zerostart.refit.wire import Server
from zerostart.upstream.vllm import reload
from zerostart.upstream.vllm.reload import Layer

logger = logging.getLogger("zerostart")
#: The name under which ``register`` has the engine.
BACKEND = "zerostart"
#: Seconds for what a server answers at once.
ANSWER_TIMEOUT_S = 60.0
_CONFIG = f'{{"backend": "{BACKEND}"}}'


def register() -> None:
    """Register the engine with vLLM, in each process of vLLM; nothing of it is imported before its use."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(BACKEND, "zerostart.refit.vllm_engine", "WeightTransfer")
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
    """vLLM's server, by its routes."""

    def __init__(self, address: str) -> None:
        remedy = f"start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config '{_CONFIG}'"
        self._server = Server(address, remedy)
        self.workers = int(self._server.call("get_world_size", timeout=ANSWER_TIMEOUT_S)["world_size"])

    def join(self, address: str, timeout: float) -> None:
        self._call("init_weight_transfer_engine", init_info={"address": address, "timeout": timeout})

    def follow(self, version: int) -> None:
        self._call("start_weight_update")
        finished = ""
        try:
            self._call("update_weights", update_info={"version": version})
            finished = str(version)
        finally:  # workers that took it are still within the update
            self._call("finish_weight_update", weight_version=finished)

    def served(self, version: int) -> None:
        """Have the engine drop what it has cached of prompts, which it does not while requests run."""
        answer = self._call("reset_prefix_cache")
        if (answer.get("success") if isinstance(answer, dict) else answer) is False:
            raise PeerError(
                "vLLM has not emptied its prefix cache, whose keys and values are of the version before, "
                "since requests are running: wait for them, or pause generation; then push again"
            )

    def leave(self) -> None:
        try:
            self._call("shutdown_weight_transfer_engine")
        except Exception as error:  # of an engine that may be gone
            logger.warning("vLLM's workers have not left: %s", error)

    def _call(self, name: str, **body: Any) -> Any:
        timeout = ANSWER_TIMEOUT_S if name.startswith("shutdown") else None
        return self._server.call(name, body, timeout)


class EngineDriver(VLLMDriver):
    """vLLM's ``LLM`` in this process, with its workers here or in processes of their own."""

    in_process = True

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        config = engine.llm_engine.vllm_config
        parallel, transfer = config.parallel_config, config.weight_transfer_config
        # Of an engine that several processes make up, each by an LLM of its own, one worker is here.
        apart = parallel.distributed_executor_backend == "external_launcher"
        self.workers = 1 if apart else int(parallel.world_size_across_dp)
        self._is_configured = transfer is not None and transfer.backend == BACKEND

    def join(self, address: str, timeout: float) -> None:
        if not self._is_configured:
            raise ConfigError(
                "the workers of this LLM are other processes, which have not been told of zerostart: make it "
                f"with weight_transfer_config={_CONFIG}"
            )
        super().join(address, timeout)

    def served(self, version: int) -> None:
        """Have the engine also say which version it has."""
        tell = getattr(self._engine.llm_engine, "set_weight_version", None)  # newer ones count
        if tell is not None:
            tell(str(version))
        super().served(version)

    def worker(self) -> Receiver | None:
        """Return the one worker, if it runs in this process."""
        if self.workers != 1:
            return None
        try:
            found = self._engine.collective_rpc(receiver, kwargs={"process": os.getpid()})
        except TypeError as error:  # vLLM sends no functions to other processes
            logger.debug("%s", error)
            return None
        assert found[0] is None or isinstance(found[0], Receiver), "of ours"
        return found[0]

    def leave(self) -> None:
        if self._is_configured:
            super().leave()

    def _call(self, name: str, **body: Any) -> Any:
        call = getattr(self._engine, name)
        if "weight_version" in body:
            return call(body["weight_version"])
        return call(body) if body else call()


# In a worker of vLLM.


def engine_worker(model: nn.Module, config: Any, rank: int) -> EngineWorker:
    """Return the worker of a model, the same at each call."""
    weights = VLLMWeights(model, config, f"vLLM's {type(model).__name__}")
    return worker_of(model, weights, f"vllm-{rank}")


def receiver(worker: Any, process: int) -> Receiver | None:
    """Return the receiver of vLLM's ``worker``, if it runs in the ``process`` that asks."""
    found = engine_worker(worker.model_runner.get_model(), worker.vllm_config, int(worker.rank))
    return found.receiver if os.getpid() == process else None


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
    """A model in a vLLM worker, for ``Receiver``."""

    def __init__(self, model: nn.Module, config: Any, name: str) -> None:
        reload.require()
        #: For messages.
        self.name = name
        self._model: Any = model
        #: vLLM's ``VllmConfig``, inside which a worker must be for whatever makes or packs layers.
        self._config = config

    @contextmanager
    def tracing(self) -> Iterator[tuple[Mapping[str, torch.Tensor], Load]]:
        with self._configured(), reload.on_meta(self._model) as tensors:
            yield tensors, self._model.load_weights

    def may_keep(self, name: str) -> bool:
        """Allow tied parameters, and what a quantised model makes itself, as in vLLM's own load."""
        return name in reload.tied(self._model) or self._config.model_config.quantization is not None

    def stages(self, filled: Mapping[str, bool]) -> Stages:
        """Yield one context manager for each layer that has a name in ``filled``; left, it is packed."""
        with self._configured(), torch.no_grad():
            written: set[int] = set()
            others: list[Layer] = []
            for prefix, layer in reload.layers_of(self._model):
                own = layer.tensors()
                wanted = {name: filled[prefix + name] for name in own if prefix + name in filled}
                if wanted:
                    written.update(id(own[name]) for name in wanted)
                    yield _stage(prefix, layer, wanted)
                else:
                    others.append(layer)
            # A head that is tied to the embedding is not filled itself, but may be packed.
            for layer in others:
                if layer.packed and any(id(tensor) in written for tensor in layer.tensors().values()):
                    layer.pack_in_place()
            reload.finish_attention(self._model, self._config.model_config.dtype)

    def _configured(self) -> AbstractContextManager[object]:
        from vllm.config import set_current_vllm_config

        configured: AbstractContextManager[object] = set_current_vllm_config(self._config)
        return configured


@contextmanager
def _stage(prefix: str, layer: Layer, wanted: Mapping[str, bool]) -> Iterator[Mapping[str, torch.Tensor]]:
    """Give one layer to fill, ``wanted`` of it: whole where true."""
    if not layer.packed:
        yield {prefix + name: layer.tensors()[name].data for name in wanted}
        return
    cast = reload.cast_biases(layer)
    layer.to_meta()
    try:
        before = layer.materialise()
        given = {}
        for name, tensor in layer.tensors().items():
            # What does not come stays: elements behind the vocabulary, buffers. If the kernel's tensor is
            # another one, they are padding, which vLLM makes of zeros.
            if tensor is not before.get(name) and not wanted.get(name, False):
                kept = before.get(name)
                same = kept is not None and (kept.shape, kept.dtype) == (tensor.shape, tensor.dtype)
                tensor.data.copy_(kept.data) if same and kept is not None else tensor.data.zero_()
            if name in wanted:
                given[name] = tensor.data
                if name in cast:
                    given[name] = tensor.data.to(layer.module.params_dtype)
        yield {prefix + name: tensor for name, tensor in given.items()}
        for name in set(cast) & given.keys():
            layer.tensors()[name].data.copy_(given[name])
        layer.pack()
    except BaseException:
        layer.put_back()
        raise
