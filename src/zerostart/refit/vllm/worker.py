"""In a vLLM worker's process: its model as a place to which weights are pushed.

vLLM packs the weights of a layer after a load. So the loader is traced, and layers are filled, with the
parameters that vLLM keeps for loads that come later; then each layer is packed by vLLM, into the memory
that the packed weights had before. One layer at a time is in memory twice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerostart.refit.connection import EngineWorker, worker_of
from zerostart.refit.receiver import Load, Receiver, Stages
from zerostart.upstream.vllm import reload
from zerostart.upstream.vllm.reload import Layer


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
