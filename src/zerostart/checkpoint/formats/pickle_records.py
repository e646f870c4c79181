"""What a pickle of tensors is read into: records of names, storages and views, and what it may name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "DTYPES",
    "INERT",
    "PLAIN",
    "STORAGES",
    "VERSIONS",
    "Opaque",
    "Storage",
    "StoredTensor",
    "plain_versions",
]

#: Element types by the storage classes that stand for them, in torch's spelling.
STORAGES = {
    "torch.DoubleStorage": "float64",
    "torch.FloatStorage": "float32",
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16",
    "torch.LongStorage": "int64",
    "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16",
    "torch.CharStorage": "int8",
    "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
    "torch.ComplexFloatStorage": "complex64",
    "torch.ComplexDoubleStorage": "complex128",
    "torch.QInt8Storage": "qint8",
    "torch.QInt32Storage": "qint32",
    "torch.QUInt8Storage": "quint8",
    "torch.QUInt4x2Storage": "quint4x2",
    "torch.QUInt2x4Storage": "quint2x4",
    "torch.UntypedStorage": "uint8",
    "torch.storage.UntypedStorage": "uint8",
}
DTYPES = frozenset(STORAGES.values()) | {
    "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu", "float4_e2m1fn_x2", "complex32",
}  # fmt: skip
#: Harmless globals whose values no weight depends on.
INERT = frozenset(
    (
        "collections.Counter", "torch.device", "torch.Tensor", "torch.nn.parameter.Parameter",
        "torch.serialization._get_layout", "_codecs.encode",
        *(f"{m}.{n}" for m in ("builtins", "__builtin__") for n in ("set", "bytearray", "complex")),
    )
)  # fmt: skip
#: Classes that are no more than a tensor.
PLAIN = ("torch.Tensor", "torch.nn.parameter.Parameter")


@dataclass(frozen=True, slots=True)
class Opaque:
    """A value that is not looked at: a global's name, or what calling it would make."""

    name: str


@dataclass(frozen=True, slots=True)
class Storage:
    """Record ``data/key`` of the archive: ``numel`` elements of ``dtype`` (torch's spelling)."""

    key: str
    dtype: str
    numel: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A view of a storage: ``offset`` and ``strides`` in elements of ``dtype``.

    ``bits`` is true for one that stands for the conjugate or the negative of what is stored.
    """

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    bits: bool


#: The key under which a state dict has what torch noted of its modules: no key that a pickle could have.
VERSIONS = Opaque("_metadata")


def plain_versions(noted: Mapping[Any, Any]) -> dict[str, dict[str, Any]]:
    """What torch notes of modules (``_metadata``): for each name numbers and strings by their names."""
    kept = (int, float, str, bool, type(None))
    return {
        name: {key: value for key, value in entry.items() if type(key) is str and type(value) in kept}
        for name, entry in noted.items()
        if type(name) is str and isinstance(entry, Mapping)
    }
