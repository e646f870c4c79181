"""The catalog: which bytes of which file hold which checkpoint tensor.

Plain data, independent of the file format that it was read from, and of models and ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from zerostart.checkpoint.storage import Storage
from zerostart.checkpoint.storage.files import FileState
from zerostart.geometry import Piece, whole

#: Width in bits of each element type, in the safetensors spelling.
DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
}

#: Names of these types in torch (``torch.float32`` without its module).
TORCH_NAMES: Mapping[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex64": "C64",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}


class TensorEntry(NamedTuple):
    """Checkpoint tensor: the file and offset of its elements.

    What torch loads of it shares memory with the tensors of the same file and storage.
    """

    name: str
    #: In safetensors' spelling, a key of ``DTYPE_BITS``.
    dtype: str
    shape: tuple[int, ...]
    #: Number of the file in the catalog.
    file: int
    #: Bytes from the start of the file to the first element.
    offset: int
    #: Bytes of its elements, which with strides are not one run of the file.
    nbytes: int
    #: In elements; None for row-major and contiguous, as a safetensors file stores all tensors.
    strides: tuple[int, ...] | None = None
    #: Elements (of this dtype) from where its storage begins to its first one.
    storage_offset: int = 0
    #: Name of an entry before it that is the very same tensor object; empty for none.
    same_as: str = ""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Location of each element, as strided pieces."""
        return whole(self.name, self.shape, self.strides)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Assembled:
    """Checkpoint tensor that is split over several stored tensors."""

    name: str
    #: Element type of all stored tensors.
    dtype: str
    shape: tuple[int, ...]
    #: Parts that tile ``shape``; their sources are names of stored tensors.
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True)
class Catalog:
    """Tensors of a checkpoint and the files that hold them."""

    #: Directory with the checkpoint's configuration; empty without one. For a URL, a local directory with
    #: copies of the config and tokenizer files.
    root: str
    #: Storage that reads the files.
    storage: Storage
    #: Stored tensors by name: the checkpoint's tensors, or the shards that the ranks of a job wrote.
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str] = field(default_factory=dict)
    #: Name of the chosen model of a pipeline; otherwise empty.
    component: str = ""
    #: Module versions that torch saves in a state dict (``_metadata``), by module name; None without them.
    versions: Mapping[str, Mapping[str, Any]] | None = None
    #: Tensors that the shards of ranks make up; None if the stored tensors are the checkpoint's tensors.
    assembled: Mapping[str, Assembled] | None = None
    #: State of the config file when the weights were opened; None without one.
    configured: FileState | None = field(default=None, compare=False)

    @property
    def weights(self) -> Mapping[str, TensorEntry | Assembled]:
        """Tensors of the checkpoint by name, stored or assembled."""
        return self.tensors if self.assembled is None else self.assembled

    @property
    def place(self) -> str:
        """Directory or URL of the checkpoint, for messages."""
        return self.storage.folder or self.root

    @property
    def files(self) -> tuple[str, ...]:
        """File names; absolute paths for local files."""
        return self.storage.files

    @property
    def sizes(self) -> tuple[int, ...]:
        """Lengths of the files in bytes."""
        return self.storage.sizes

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(entry.nbytes for entry in self.weights.values())


def contiguous_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return True if ``strides`` (elements) are effectively row-major."""
    # The stride of a dimension of size 1 and of an empty tensor has no effect.
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 0:
            return True
        if size != 1 and stride != step:
            return False
        step *= size
    return True
