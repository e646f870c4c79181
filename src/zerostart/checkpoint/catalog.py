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
    """One checkpoint tensor, whose first element is at ``offset`` (bytes) of file number ``file``.

    ``strides`` are in elements, None for row-major and contiguous as a safetensors file stores all tensors.
    ``nbytes`` are the bytes of its elements, which with strides are not one run of the file.

    What torch loads of it shares memory with the tensors of the same file and storage. ``storage_offset`` are
    the elements (of this dtype) from where its storage begins, and ``same_as`` names the entry that is
    the very same tensor object under another name, if there is one before it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int
    nbytes: int
    strides: tuple[int, ...] | None = None
    storage_offset: int = 0
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
    """One checkpoint tensor that lies in several stored ones: ``pieces`` of these tile its ``shape``.

    ``dtype`` is that of all of them; the sources of the pieces are their names.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
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
    """All tensors of a checkpoint and the files that hold them.

    ``storage`` has the files and gives their bytes; ``tensors`` maps a name to its entry; ``root`` is the
    directory in which the checkpoint's configuration is looked for, empty where there is none. Of a pipeline
    ``component`` is the name of the model that was chosen. ``versions`` is what torch saves of the modules
    beside their tensors (a state dict's ``_metadata``), by module name; None where there is none.

    Where the ranks of a job wrote their shares, ``tensors`` are those, and ``assembled`` the tensors that
    they make up; None where what is stored is what is meant. ``configured`` is the state of the configuration
    that is of these weights, where they were opened; None where there is none.
    """

    root: str
    storage: Storage
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str] = field(default_factory=dict)
    component: str = ""
    versions: Mapping[str, Mapping[str, Any]] | None = None
    assembled: Mapping[str, Assembled] | None = None
    configured: FileState | None = field(default=None, compare=False)

    @property
    def weights(self) -> Mapping[str, TensorEntry | Assembled]:
        """The tensors of the checkpoint by their names, however they are stored."""
        return self.tensors if self.assembled is None else self.assembled

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
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 0:
            return True
        if size != 1 and stride != step:
            return False
        step *= size
    return True
