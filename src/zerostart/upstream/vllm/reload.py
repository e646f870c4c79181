"""vLLM's layer-wise reload, one layer at a time, for weights that no weight loader copies."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zerostart.upstream.guard import Use, demand, misfit

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
def require() -> None:
    """Raise UnsupportedVersionError unless vLLM's reload is as expected."""
    demand((_LAYERWISE, _META), "zerostart.refit cannot fill its parameters; vLLM's own weight transfer can")


class Layer:
    """One layer of a vLLM model, and what its parameters were like before vLLM packed them."""

    def __init__(self, layer: nn.Module) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        self.module: Any = layer
        self._info = get_layerwise_info(layer)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Its own parameters and buffers, as they are now."""
        both = (*self.module._parameters.items(), *self.module._buffers.items())
        return {name: tensor for name, tensor in both if tensor is not None}

    @property
    def packed(self) -> bool:
        """Whether vLLM makes something else of its weights after a load."""
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

        return isinstance(getattr(self.module, "quant_method", None), QuantizeMethodBase)

    def to_meta(self) -> None:
        """Put what a load fills, on meta, in the place of what the layer computes with."""
        from vllm.model_executor.model_loader.reload import meta

        self._info.kernel_tensors = (
            {name: t for name, t in self.module._parameters.items() if t is not None},
            {name: t for name, t in self.module._buffers.items() if t is not None},
        )
        self._info.kernel_non_persistent_buffers = set(self.module._non_persistent_buffers_set)
        meta.restore_layer_on_meta(self.module, self._info)

    def materialise(self) -> dict[str, torch.Tensor]:
        """Memory for what is on meta; gives what the layer computes with meanwhile, by name."""
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
        """Have vLLM make of the weights what the layer computes with, in the memory of before."""
        from vllm.model_executor.model_loader.reload import layerwise

        if self._is_dropped() and not misfit((_LATENT,)):
            self._info.reset()  # `finish_attention` packs it, and drops it again
            return
        with _packing_experts_anew(getattr(self.module, "quant_method", None)):
            layerwise._layerwise_process(self.module, self._info)

    def _is_dropped(self) -> bool:
        kernel = self._info.kernel_tensors
        dropped = kernel is not None and "weight" in kernel[0] and not kernel[0]["weight"].numel()
        return dropped and bool(getattr(self.module, "_cpu_skip_gemm_dispatch", False))

    def pack_in_place(self) -> None:
        """Have vLLM pack weights that stay where they are, since they are another layer's."""
        self.module.quant_method.process_weights_after_loading(self.module)


@contextmanager
def _packing_experts_anew(method: Any) -> Iterator[None]:
    """Pack experts on a CPU as at their first load; vLLM copies into the parameters of their old kernel."""
    from vllm.platforms import current_platform

    kernel = getattr(method, "moe_kernel", None)
    if kernel is None or not current_platform.is_cpu() or misfit((_EXPERTS,)):
        yield
        return
    quantised = method.moe_quant_config
    method.moe_kernel = None
    try:
        yield
    finally:
        method.moe_kernel, method.moe_quant_config = kernel, quantised


def layers_of(model: nn.Module) -> Iterator[tuple[str, Layer]]:
    """The modules of a model that have tensors of their own, each once, under its first name and a dot."""
    for name, module in model.named_modules():
        layer = Layer(module)
        if layer.tensors():
            yield (f"{name}." if name else ""), layer


def tied(model: nn.Module) -> set[str]:
    """Names under which a tensor is there a second time."""
    first: dict[int, str] = {}
    found = set()
    for prefix, layer in layers_of(model):
        for name, tensor in layer.tensors().items():
            if first.setdefault(id(tensor), prefix + name) != prefix + name:
                found.add(prefix + name)
    return found


@contextmanager
def on_meta(model: nn.Module) -> Iterator[Mapping[str, torch.Tensor]]:
    """Yield the tensors that a load fills, on meta, by name; what vLLM keeps real then is real here."""
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
    """Biases of which a kernel keeps another dtype than that of a load."""
    wanted = getattr(layer.module, "params_dtype", None)
    bias = layer.module._parameters.get("bias")
    return ["bias"] if bias is not None and wanted is not None and bias.dtype != wanted else []


def _show_cast(layer: Layer, name: str) -> None:
    before: Any = layer.module._parameters[name]
    shown: Any = torch.empty_like(before.data, dtype=layer.module.params_dtype, device="meta")
    # As vLLM makes its tensors on meta: class and attributes, which loaders ask for, are the parameter's.
    shown.__class__ = before.__class__
    shown.__dict__ = before.__dict__.copy()
    delattr(layer.module, name)
    layer.module.register_parameter(name, shown)


def finish_attention(model: nn.Module, dtype: torch.dtype) -> None:
    """Have attention layers make anew what they make of other layers' weights (latent attention does)."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    modules: list[Any] = [*model.modules()]
    for module in filter(is_deferred_attention_layer, modules):
        module.process_weights_after_loading(dtype)
