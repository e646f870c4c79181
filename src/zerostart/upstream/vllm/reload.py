"""Fill and pack one layer of a vLLM model at a time, without a weight loader."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zerostart.upstream.guard import Use, demand, find_misfits

_EXPERTS = Use(
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
    "_setup_kernel, .moe_kernel",
    "on a CPU, experts are packed at each load: vLLM packs them when it makes their kernel, and "
    "computes with unpacked weights after a second load",
)
_LAYERWISE = Use(
    "vllm.model_executor.model_loader.reload.layerwise",
    "_layerwise_process(layer, info), _place_kernel_tensors, get_layerwise_info, initialize_layerwise_reload",
    "one layer is filled and packed at a time, without a weight loader",
)
_META = Use(
    "vllm.model_executor.model_loader.reload.meta",
    "materialize_layer(layer, info), restore_layer_on_meta(layer, info)",
    "parameters as a load finds them, without memory and with it",
)
_LATENT = Use(
    "vllm.model_executor.layers.attention.mla_attention:MLAAttention",
    "process_weights_after_loading",
    "on some CPUs latent attention packs a projection's weight itself, and drops it: until then it "
    "is left as it was filled",
)


@functools.cache
def require_version() -> None:
    """Raise UnsupportedVersionError unless vLLM's reload is as expected."""
    demand((_LAYERWISE, _META), "zerostart.refit cannot fill its parameters; vLLM's own weight transfer can")


class Layer:
    """Layer of a vLLM model, with the shapes of its parameters before packing."""

    def __init__(self, layer: nn.Module) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        self.module: Any = layer
        self._info = get_layerwise_info(layer)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the layer's own parameters and buffers."""
        both = (*self.module._parameters.items(), *self.module._buffers.items())
        return {name: tensor for name, tensor in both if tensor is not None}

    @property
    def packed(self) -> bool:
        """True if vLLM packs the weights after a load."""
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

        return isinstance(getattr(self.module, "quant_method", None), QuantizeMethodBase)

    def to_meta(self) -> None:
        """Replace the packed tensors by unpacked ones on meta."""
        from vllm.model_executor.model_loader.reload import meta

        self._info.kernel_tensors = (
            {name: t for name, t in self.module._parameters.items() if t is not None},
            {name: t for name, t in self.module._buffers.items() if t is not None},
        )
        self._info.kernel_non_persistent_buffers = set(self.module._non_persistent_buffers_set)
        meta.restore_layer_on_meta(self.module, self._info)

    def materialise(self) -> dict[str, torch.Tensor]:
        """Allocate the unpacked tensors; return the packed ones by name."""
        from vllm.model_executor.model_loader.reload import meta

        meta.materialize_layer(self.module, self._info)
        parameters, buffers = self._info.kernel_tensors
        return {**parameters, **buffers}

    def put_back(self) -> None:
        """Undo ``to_meta``."""
        from vllm.model_executor.model_loader.reload import layerwise

        layerwise._place_kernel_tensors(self.module, self._info)
        self._info.reset()

    def pack(self) -> None:
        """Pack the weights into the memory of the old packed tensors."""
        from vllm.model_executor.model_loader.reload import layerwise

        if self._is_dropped() and not find_misfits((_LATENT,)):
            self._info.reset()  # `finish_attention` packs it
            return
        with _pack_experts_again(getattr(self.module, "quant_method", None)):
            layerwise._layerwise_process(self.module, self._info)

    def _is_dropped(self) -> bool:
        kernel = self._info.kernel_tensors
        dropped = kernel is not None and "weight" in kernel[0] and not kernel[0]["weight"].numel()
        return dropped and bool(getattr(self.module, "_cpu_skip_gemm_dispatch", False))

    def pack_in_place(self) -> None:
        """Pack shared weights of another layer in place."""
        self.module.quant_method.process_weights_after_loading(self.module)


@contextmanager
def _pack_experts_again(method: Any) -> Iterator[None]:
    """Pack experts on a CPU inside as at their first load."""
    from vllm.platforms import current_platform

    kernel = getattr(method, "moe_kernel", None)
    if kernel is None or not current_platform.is_cpu() or find_misfits((_EXPERTS,)):
        yield
        return
    quantised = method.moe_quant_config
    method.moe_kernel = None
    try:
        yield
    finally:
        method.moe_kernel, method.moe_quant_config = kernel, quantised


def layers_of(model: nn.Module) -> Iterator[tuple[str, Layer]]:
    """Yield each module with own tensors, under its first name and a dot."""
    for name, module in model.named_modules():
        layer = Layer(module)
        if layer.tensors():
            yield (f"{name}." if name else ""), layer


def tied(model: nn.Module) -> set[str]:
    """Return the second and later names of shared tensors."""
    first: dict[int, str] = {}
    names = set()
    for prefix, layer in layers_of(model):
        for name, tensor in layer.tensors().items():
            if first.setdefault(id(tensor), prefix + name) != prefix + name:
                names.add(prefix + name)
    return names


@contextmanager
def on_meta(model: nn.Module) -> Iterator[Mapping[str, torch.Tensor]]:
    """Yield the unpacked tensors on meta by name."""
    swapped: dict[str, Layer] = {}
    with torch.no_grad():
        try:
            for prefix, layer in layers_of(model):
                swapped[prefix] = layer
                layer.to_meta()
                for name in cast_biases(layer):
                    _show_cast(layer, name)
            yield {
                prefix + name: tensor
                for prefix, layer in swapped.items()
                for name, tensor in layer.tensors().items()
            }
        finally:
            for layer in swapped.values():
                layer.put_back()


def cast_biases(layer: Layer) -> list[str]:
    """Return biases whose kernel has another dtype than a load."""
    dtype = getattr(layer.module, "params_dtype", None)
    bias = layer.module._parameters.get("bias")
    return ["bias"] if bias is not None and dtype is not None and bias.dtype != dtype else []


def _show_cast(layer: Layer, name: str) -> None:
    before: Any = layer.module._parameters[name]
    shown: Any = torch.empty_like(before.data, dtype=layer.module.params_dtype, device="meta")
    # Loaders need the class and attributes of the parameter.
    shown.__class__ = before.__class__
    shown.__dict__ = before.__dict__.copy()
    delattr(layer.module, name)
    layer.module.register_parameter(name, shown)


def finish_attention(model: nn.Module, dtype: torch.dtype) -> None:
    """Update tensors that attention layers derive from other layers' weights."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    modules: list[Any] = [*model.modules()]
    for module in filter(is_deferred_attention_layer, modules):
        module.process_weights_after_loading(dtype)
