"""The element types of checkpoint files as torch dtypes."""

from __future__ import annotations

import torch

from zerostart.errors import CheckpointError

__all__ = ["spelling", "torch_dtype"]

_TORCH: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
_SPELLING = {dtype: name for name, dtype in _TORCH.items()}


def torch_dtype(name: str, tensor: str = "") -> torch.dtype:
    """The torch dtype of the safetensors spelling ``name``.

    Raises CheckpointError for a type that torch has no whole-byte elements for (``F4``, ``F6``).
    """
    try:
        return _TORCH[name]
    except KeyError:
        raise CheckpointError(
            f"tensor {tensor!r} has elements of type {name}, which torch cannot hold"
        ) from None


def spelling(dtype: torch.dtype) -> str:
    """The safetensors spelling of a torch dtype."""
    return _SPELLING[dtype]
