"""Multiply quantised tensors by scales that no library applies, such as ComfyUI's."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import torch

from zerostart.checkpoint.catalog import Catalog
from zerostart.errors import ConversionError
from zerostart.recipe.stored import CheckpointSymbols
from zerostart.recipe.symbolic import SymbolicTensor

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = ("scale_weight", "weight_scale")
#: Suffixes of tensors about activations, or about a format that the dtype says as well.
_HINTS = ("comfy_quant", "input_scale", "scale_input")
_OF_WEIGHT = re.compile(
    rf"(.*\.)?({'|'.join((*_SCALES, *_HINTS))}|weight_scale_inv|weight_scale_2|weight_zero_point|weight_[gv]"
    r"|qzeros|scales|SCB|g_idx)"
)
#: Fast check before the two patterns: each name that they match has one of these words, most names have none.
_MAY_QUANTISE = re.compile("scale|quant|zero|weight_[gv]|SCB|g_idx|absmax")
_OF_TENSOR = re.compile(r"(.+?)(_scale|_scale_inv|_zero_point|\.absmax|\.quant_map|\.quant_state\..+)")


def dequantise_symbols(catalog: Catalog, targets: Collection[str]) -> CheckpointSymbols:
    """Return the checkpoint's tensors, multiplied by their scales.

    A name in ``targets`` belongs to the model itself. Raises ConversionError for other quantised tensors,
    whose stored numbers are not the weights.
    """
    symbols = CheckpointSymbols(catalog)
    owners = {name: owner for name in symbols if name not in targets and (owner := _owner_of(name, symbols))}
    quantised = {name: owner for name, owner in owners.items() if owner in symbols or owner in targets}
    scaled: dict[str, SymbolicTensor] = {}
    for name, owner in quantised.items():
        weight, scale = symbols.get(owner), symbols[name]
        if _is_scale(name, owner) and weight is not None and (shape := _shape_for(weight, scale)) is not None:
            scaled[owner] = weight.to(torch.float32) * scale.to(torch.float32).view(shape)  # type: ignore[assignment]
    for name, owner in quantised.items():
        is_known = _is_scale(name, owner) or name.rpartition(".")[2] in _HINTS
        scales = [other for other, whose in quantised.items() if whose == owner and _is_scale(other, owner)]
        if owner not in scaled or not is_known or len(scales) > 1:
            kinds = [str(symbols[one].dtype) for one in (name, owner) if one in symbols]
            raise ConversionError(
                f"{name} ({', of '.join(kinds)}) belongs to the quantised tensor {owner}, whose stored "
                "numbers are not the weights without it. Only float8 weights with one scale, or one for "
                "each row, are dequantised: convert the checkpoint to bfloat16, or pass a converter that "
                "dequantises it"
            )
    markers = {name for name in symbols if scaled and name.rpartition(".")[2] == "scaled_fp8"}
    symbols.change(scaled, {*quantised, *markers})
    return symbols


def _owner_of(name: str, symbols: Mapping[str, SymbolicTensor]) -> str | None:
    if not _MAY_QUANTISE.search(name):
        return None
    if of_weight := _OF_WEIGHT.fullmatch(name):
        return f"{of_weight[1] or ''}weight"
    if of_tensor := _OF_TENSOR.fullmatch(name):
        return of_tensor[1]
    # Next to float8 numbers, any name with "scale" is a scale.
    module, _, leaf = name.rpartition(".")
    near = (one for one in (module, f"{module}.weight") if one in symbols and symbols[one].dtype in _FLOAT8)
    return next(near, None) if "scale" in leaf else None


def _is_scale(name: str, owner: str) -> bool:
    return name.rpartition(".")[2] in _SCALES or name == f"{owner}_scale"


def _shape_for(weight: SymbolicTensor, scale: SymbolicTensor) -> list[int] | None:
    """Return the shape in which ``scale`` multiplies ``weight``, or None."""
    if weight.dtype not in _FLOAT8 or not scale.dtype.is_floating_point:
        return None
    ones = [1] * (weight.dim() - 1)
    if scale.numel() == 1:
        return [1, *ones]
    rows = weight.shape[0] if weight.dim() else 0
    return [rows, *ones] if list(scale.shape) in ([rows], [rows, *ones]) else None
