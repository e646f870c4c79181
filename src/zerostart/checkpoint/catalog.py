"""The catalog: which bytes of which file hold which checkpoint tensor.

Plain data, independent of the file format that it was read from, and of models and ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

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

#: The same types by their names in torch (``torch.float32`` without its module).
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


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One checkpoint tensor: where its elements lie in which file.

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

    def __reduce__(self) -> tuple[type[TensorEntry], tuple[object, ...]]:
        # By fields in their order: what a dataclass with slots does of itself takes twice as long, and rank 0
        # pickles tens of thousands while the others wait.
        fields = (self.name, self.dtype, self.shape, self.file, self.offset, self.nbytes, self.strides)
        shared = (self.storage_offset, self.same_as)
        return TensorEntry, (*fields, *shared) if shared != (0, "") else fields

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Where each of its elements lies."""
        return whole(self.name, self.shape, self.strides)

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class Assembled:
    """One checkpoint tensor that lies in several stored ones."""

    name: str
    #: That of all the stored ones.
    dtype: str
    shape: tuple[int, ...]
    #: They tile ``shape``; their sources are names of stored tensors.
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
    """All tensors of a checkpoint and the files that hold them."""

    #: Directory in which the checkpoint's configuration is looked for; empty where there is none. Of a URL it
    #: is one of this machine with copies of what lies there beside the weights.
    root: str
    #: Has the files, and gives their bytes.
    storage: Storage
    #: What is stored, by name: the tensors themselves, or the shares that the ranks of a job wrote.
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str] = field(default_factory=dict)
    #: Of a pipeline the name of the model that was chosen; else empty.
    component: str = ""
    #: What torch saves of the modules beside their tensors (a state dict's ``_metadata``), by module name;
    #: None where there is none.
    versions: Mapping[str, Mapping[str, Any]] | None = None
    #: Tensors that shares of ranks make up; None where what is stored is what is meant.
    assembled: Mapping[str, Assembled] | None = None
    #: State of the configuration of these weights when they were opened; None where there is none.
    configured: FileState | None = field(default=None, compare=False)

    @property
    def weights(self) -> Mapping[str, TensorEntry | Assembled]:
        """The tensors of the checkpoint by their names, however they are stored."""
        return self.tensors if self.assembled is None else self.assembled

    @property
    def place(self) -> str:
        """The directory or the URL of one where the checkpoint lies, as a person knows it."""
        return self.storage.folder or self.root

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files: absolute paths where they are files."""
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
    """Whether ``strides`` (elements) are the row-major ones, as far as they matter."""
    # Strides of dimensions of size 1 mean nothing; of an empty tensor none does.
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 0:
            return True
        if size != 1 and stride != step:
            return False
        step *= size
    return True
