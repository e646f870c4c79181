"""The catalog: which bytes of which file hold which checkpoint tensor.

Plain data, independent of the file format that it was read from, and of models and ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["DTYPE_BITS", "Catalog", "TensorEntry"]

#: Width in bits of each element type, in the safetensors spelling.
DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One checkpoint tensor: row-major, contiguous, at ``offset`` (bytes) of file number ``file``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int
    nbytes: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Catalog:
    """All tensors of a checkpoint and the files that hold them.

    ``files`` are absolute paths and ``sizes`` their lengths in bytes; ``tensors`` maps a name to its
    entry; ``root`` is the directory in which the checkpoint's configuration is looked for.
    """

    root: str
    files: tuple[str, ...]
    sizes: tuple[int, ...]
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(entry.nbytes for entry in self.tensors.values())
