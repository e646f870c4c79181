"""Dequantise a checkpoint with the quantizers of transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from zerostart.errors import BuildError
from zerostart.upstream.guard import Use, demand

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.core_model_loading import ConversionOps, WeightTransform
    from transformers.quantizers.base import HfQuantizer

TOUCHED = (
    Use(
        "transformers.quantizers.base:HfQuantizer",
        "update_weight_conversions, "
        "transformers.integrations.finegrained_fp8:Fp8Dequantize._dequantize_one(quantized, scales, *, "
        "output_dtype), .quantization_config",
        "the quantizer whose weights are dequantised while they are read",
    ),
    Use(
        "transformers.quantizers.base:HfQuantizer",
        "get_weight_conversions, remove_quantization_config, preprocess_model(*, model, dtype), "
        "transformers.quantizers.auto:AutoHfQuantizer.from_config(quantization_config)",
        "the operations that dequantise",
    ),
)


def dequantizer(quantization: Mapping[str, object], source: str) -> HfQuantizer:
    """Return the library's quantizer for a ``quantization_config`` (of the checkpoint ``source``)."""
    demand(TOUCHED)
    from transformers.quantizers.auto import AutoHfQuantizer

    method = quantization.get("quant_method", "unknown")
    try:
        quantizer = AutoHfQuantizer.from_config(dict(quantization), pre_quantized=True)
        can_dequantise = hasattr(quantizer.quantization_config, "dequantize")
        if can_dequantise:
            quantizer.quantization_config.dequantize = True
        operations = _dequantising(quantizer.get_weight_conversions()) if can_dequantise else []
    except (ImportError, ValueError, TypeError, AttributeError) as error:
        raise BuildError(f"{source} is quantised ({method}), and transformers refuses it: {error}") from error
    if not operations:
        raise BuildError(
            f"{source} is quantised ({method}), and transformers cannot dequantise this format "
            "while it loads; dequantise it first, with from_pretrained, model.dequantize() and "
            "save_pretrained"
        )
    block = getattr(quantizer.quantization_config, "weight_block_size", None)
    if block is not None:
        _fix_block_sizes(quantizer, tuple(block))
    return quantizer


def dequantise(config: PreTrainedConfig) -> None:
    """Make the library dequantise the weights of a configuration while it loads."""
    # In a composite model the text configuration may be the quantised one.
    text = config.get_text_config(decoder=True)
    owner = next((c for c in (config, text) if getattr(c, "quantization_config", None) is not None), None)
    if owner is None:
        return
    stored = owner.quantization_config
    described = stored if isinstance(stored, Mapping) else stored.to_dict()
    dequantizer(described, str(config.name_or_path or type(config).__name__))
    if isinstance(stored, dict):
        stored["dequantize"] = True
    else:
        stored.dequantize = True


def method_of(quantizer: HfQuantizer) -> str:
    """Return the name of the quantisation method."""
    method = quantizer.quantization_config.quant_method
    return str(getattr(method, "value", method))


def _dequantising(conversions: Iterable[WeightTransform]) -> list[ConversionOps]:
    operations = [op for conversion in conversions for op in getattr(conversion, "operations", ())]
    return [op for op in operations if getattr(op, "hf_quantizer", None) is not None]


def _fix_block_sizes(quantizer: HfQuantizer, block: tuple[int, int]) -> None:
    update = quantizer.update_weight_conversions

    def fixed(*arguments: object) -> object:
        conversions = update(*arguments)
        for conversion in conversions:
            operations = getattr(conversion, "operations", [])
            for at, operation in enumerate(operations):
                if getattr(operation, "hf_quantizer", None) and hasattr(operation, "_dequantize_one"):
                    operations[at] = _allow_partial_blocks(type(operation), block)(operation.hf_quantizer)
        return conversions

    quantizer.update_weight_conversions = fixed


def prepare(quantizer: HfQuantizer, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Prepare a model on meta for dequantised weights; its configuration becomes plain."""
    quantizer.preprocess_model(model=model, dtype=dtype, device_map=None, checkpoint_files=None)
    quantizer.remove_quantization_config(model)


def _allow_partial_blocks(operation: type[ConversionOps], block: tuple[int, int]) -> type[ConversionOps]:
    """Dequantise fp8 weights with incomplete last blocks, as in DeepSeek-V3.

    The library uses the wrong block size; this follows ``weight_dequant_kernel`` of the model's release.
    """

    class PartialBlocks(operation):  # type: ignore[misc]  # the base is untyped
        def _dequantize_one(
            self, quantized: torch.Tensor, scales: torch.Tensor, output_dtype: torch.dtype | None = None
        ) -> torch.Tensor:
            rows, columns = quantized.shape[-2:]
            is_cut = rows % block[0] or columns % block[1]
            grid = (-(-rows // block[0]), -(-columns // block[1]))
            if not is_cut or quantized.element_size() != 1 or tuple(scales.shape[-2:]) != grid:
                whole: torch.Tensor = super()._dequantize_one(quantized, scales, output_dtype)
                return whole
            spread = scales.to(torch.float32).unsqueeze(-1).unsqueeze(-3)
            spread = spread.expand(*spread.shape[:-4], spread.shape[-4], block[0], spread.shape[-2], block[1])
            spread = spread.reshape(
                *scales.shape[:-2], scales.shape[-2] * block[0], scales.shape[-1] * block[1]
            )
            spread = spread[..., :rows, :columns]
            return (quantized.to(torch.float32) * spread).to(output_dtype or scales.dtype)

    return PartialBlocks
