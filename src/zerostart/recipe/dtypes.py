"""Element types of checkpoint files as torch dtypes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from zerostart.checkpoint.catalog import Assembled, TensorEntry
from zerostart.errors import CheckpointError, ConfigError

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
    """Return the torch dtype of a safetensors type.

    Raises CheckpointError for a type that torch has no whole-byte elements for (``F4``, ``F6``).
    """
    try:
        return _TORCH[name]
    except KeyError:
        raise CheckpointError(
            f"tensor {tensor!r} has elements of type {name}, which torch does not have"
        ) from None


def spelling(dtype: torch.dtype, tensor: str = "") -> str:
    """Return the safetensors type of a torch dtype.

    Raises ConfigError, with the name ``tensor``, for a dtype without one (``complex128``, quantised ones).
    """
    try:
        return _SPELLING[dtype]
    except KeyError:
        raise ConfigError(
            f"{tensor or 'a tensor'} has elements of the type {dtype}, which safetensors files do not know: "
            "convert it (real and imaginary part, or a smaller type), or leave it out"
        ) from None


def can_hold(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Return True if casting ``narrow`` to ``wide`` loses nothing."""
    if wide == narrow or narrow is torch.bool:
        return True
    if wide is torch.bool or narrow.is_complex or wide.is_complex:
        return wide.is_complex and can_hold(wide.to_real(), narrow.to_real())
    if not wide.is_floating_point:
        if narrow.is_floating_point:
            return False
        a, b = torch.iinfo(wide), torch.iinfo(narrow)
        return bool(a.min <= b.min and b.max <= a.max)
    mine = torch.finfo(wide)
    if not narrow.is_floating_point:
        return bool(2 / mine.eps >= 2 ** torch.iinfo(narrow).bits)
    theirs = torch.finfo(narrow)
    smallest = mine.smallest_normal * mine.eps
    return bool(
        mine.eps <= theirs.eps and mine.max >= theirs.max and smallest <= theirs.smallest_normal * theirs.eps
    )


def main_dtype(entries: Iterable[TensorEntry | Assembled]) -> torch.dtype | None:
    """Return the floating dtype of most elements, or None.

    Raises CheckpointError for a dtype that torch does not have.
    """
    elements = Counter[torch.dtype]()
    for entry in entries:
        if (dtype := torch_dtype(entry.dtype, entry.name)).is_floating_point:
            elements[dtype] += entry.numel
    return max(elements, key=lambda dtype: elements[dtype], default=None)
