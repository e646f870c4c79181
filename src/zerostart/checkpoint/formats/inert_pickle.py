"""Read pickles from unknown sources as data: nothing that they name is executed.

Python's own unpickler runs them, but a global is only its name (``Global``), an object is a record of a call
(``InertObject``), and a tensor is a view of a storage (``StoredTensor``).
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from zerostart.checkpoint.strict_json import DAMAGED, shown
from zerostart.errors import CheckpointError

#: Maximum number of dimensions of a tensor; torch's own operators stop at 64.
MAX_DIMENSIONS = 64
#: Maximum number of members of nested containers, in addition to eight for each byte of the pickle.
FREE_MEMBERS = 1 << 20
_MAX_COUNT = 2**63 - 1

#: Element types in torch's spelling, by the storage classes of ``torch``.
_STORAGES = {
    "Untyped": "uint8", "Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64",
    "Half": "float16", "BFloat16": "bfloat16", "Float": "float32", "Double": "float64", "Bool": "bool",
    "ComplexFloat": "complex64", "ComplexDouble": "complex128",
}  # fmt: skip
#: Globals that weights files may call although no weight depends on the result.
_HARMLESS = (
    "torch.Tensor", "torch.nn.parameter.Parameter", "collections.Counter", "torch.device",
    "torch.serialization._get_layout", "torch.storage.UntypedStorage", "_codecs.encode",
    *(f"{m}.{n}" for m in ("builtins", "__builtin__") for n in ("set", "bytearray", "complex")),
)  # fmt: skip


class StorageRecord(NamedTuple):
    """Record ``data/key`` of the archive, with its dtype."""

    key: str
    dtype: str


class StoredTensor(NamedTuple):
    """View of a storage; offset and strides in elements."""

    storage: StorageRecord
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    #: True for the conjugate or the negative of the stored elements.
    bits: bool


class _Refused(Exception):
    """The pickle has contents that no checkpoint has."""


@dataclass(frozen=True, slots=True)
class Global:
    """Name of a class or function, with its module."""

    name: str


@dataclass(eq=False, slots=True, repr=False)
class InertObject:
    """Record of a call, and of the object's ``state``."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None

    def get(self, key: str) -> Any:
        """Return an attribute of the state, or None."""
        for part in self.state if type(self.state) is tuple else (self.state,):
            if isinstance(part, dict) and key in part:
                return part[key]
        return None

    def append(self, *items: object) -> None:
        """Ignore the items of a list or dictionary class."""

    extend = __setitem__ = append


class _Dict(dict[Any, Any]):
    """Dictionary with the ``_metadata`` of a state dict."""

    metadata: Any = None

    def __setitem__(self, key: object, value: object) -> None:
        # Tuples are hashed by recursion in C; hashes of long integers can be made to collide.
        short = type(key) is int and key.bit_length() <= 64
        if not short and not isinstance(key, (str, float, bool, bytes, type(None), Global, InertObject)):
            raise _Refused(f"has a dictionary with a {type(key).__name__} for a key")
        super().__setitem__(key, value)


def plain_versions(metadata: Mapping[object, object]) -> dict[str, dict[str, object]]:
    """Return the plain values of a state dict's ``_metadata``."""
    plain = (int, float, bool, type(None))  # a pickle may share one long string a million times
    return {
        name: {
            key: value
            for key, value in entry.items()
            if type(key) is str and len(key) <= 64 and type(value) in plain
        }
        for name, entry in metadata.items()
        if type(name) is str and isinstance(entry, Mapping)
    }


def read_inert_pickle(raw: bytes, path: str, weights: bool = False) -> Any:
    """Read a pickle into plain values and inert records.

    The values are containers, primitives, StoredTensor, StorageRecord, Global and InertObject. Sets become
    lists, a ``torch.Size`` a ``tuple``. ``path`` serves messages. A file of ``weights`` may name only
    what ``torch.save`` writes for tensors and plain containers. Raises CheckpointError if the pickle is
    damaged or refused.
    """
    try:
        value = _Unpickler(raw, weights).load()
        _check_members(value, FREE_MEMBERS + 8 * len(raw))
        return value
    except _Refused as error:
        raise CheckpointError(
            f"{path}: the pickle of the weights {error}; none of its code was run. If you trust where "
            "the file comes from, load it with torch.load(..., weights_only=False) and save its "
            "tensors as safetensors"
        ) from None
    except Exception as error:  # damage leads to any error
        raise CheckpointError(
            f"{path}: the pickle in the file is damaged ({shown(str(error))}): {DAMAGED}"
        ) from error


#: The types that mypy knows are those of the unpickler in C.
_InPython: Any = pickle._Unpickler


# The unpickler in C allocates as many entries of its memo as an index says; this one has a dictionary.
class _Unpickler(_InPython):  # type: ignore[misc]
    def __init__(self, raw: bytes, weights: bool) -> None:
        super().__init__(io.BytesIO(raw))
        self._weights = weights
        self._dtypes: dict[str, str] = {}

    def find_class(self, module: str, name: str) -> Global:
        name = f"{module}.{name}"
        is_plain = re.fullmatch(r"torch\.\w+", name) or name in _CALLS or name in _HARMLESS
        if self._weights and not is_plain:
            raise _Refused(f"names {shown(name)}, which is code and no part of plain tensors")
        return Global(name)

    def persistent_load(self, pid: object) -> StorageRecord:
        match pid:
            case ("storage", Global(name), str(key), str(), int()):
                if dtype := _STORAGES.get(name.rpartition(".")[2].removesuffix("Storage")):
                    if self._dtypes.setdefault(key, dtype) != dtype:  # torch would use the first
                        raise _Refused(f"gives the storage {shown(key)} two dtypes")
                    return StorageRecord(key, dtype)
        raise _Refused("refers to something outside it that is not a storage")

    def _call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if type(function) is not Global or type(arguments) is not tuple:
            raise TypeError(f"a {type(function).__name__} is called")
        if (call := _CALLS.get(function.name)) is not None:
            self.append(call(*arguments))
        elif self._weights and function.name not in _HARMLESS:
            raise _Refused(f"calls {shown(function.name)}, which is code and no part of plain tensors")
        else:
            self.append(InertObject(function.name, arguments))

    def _set_state(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is InertObject:
            target.state = state
        elif type(target) is _Dict and isinstance(state, dict):
            versions = state.get("_metadata")
            target.metadata = versions if isinstance(versions, dict) else None
        else:
            raise TypeError(f"a {type(target).__name__} has no state")

    #: Without what allocates before it reads (BYTEARRAY8), hashes (DICT, FROZENSET) or parses long integers.
    dispatch: ClassVar[dict[int, Any]] = {
        code: load for code, load in _InPython.dispatch.items() if code not in b"\x96d\x91\x92\x8bIL"
    }
    dispatch[ord("R")] = dispatch[0x81] = _call
    dispatch[ord("b")] = _set_state
    dispatch[ord("}")] = lambda self: self.append(_Dict())
    # Sets are read as lists, so that nothing is hashed.
    dispatch[0x8F], dispatch[0x90] = dispatch[ord("]")], dispatch[ord("e")]


def _check_members(value: object, limit: int) -> None:
    """Raise _Refused for more than ``limit`` nested members."""
    members: dict[int, int] = {}  # of each container and those inside it; 0: not yet counted
    pending = [value]
    while pending:
        item: Any = pending[-1]
        if members.get(id(item)):
            pending.pop()
            continue
        if isinstance(item, InertObject):
            inside: Any = (item.arguments, item.state)
        else:
            inside = (*item, *item.values(), item.metadata) if type(item) is _Dict else item
        inside = inside if type(item) in _CONTAINERS else ()
        containers = [one for one in inside if type(one) in _CONTAINERS]
        if id(item) not in members:
            members[id(item)] = 0
            pending += [one for one in containers if id(one) not in members]
            continue
        pending.pop()
        if any(not members[id(one)] and type(one) is not InertObject for one in containers):
            raise _Refused("holds a container that holds itself")
        members[id(item)] = 1 + len(inside) + sum(members[id(one)] for one in containers)
        if members[id(item)] > limit:
            raise _Refused(f"holds containers in one another, with more than {limit} members in all")


_CONTAINERS = (_Dict, list, tuple, InertObject)


def _counts(values: object) -> bool:
    return (
        type(values) is tuple
        and len(values) <= MAX_DIMENSIONS
        and all(type(v) is int and 0 <= v <= _MAX_COUNT for v in values)
    )


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> StoredTensor:
    """Rebuild a tensor; ``rest`` is requires_grad, hooks, dtype (v3) and metadata."""
    is_right = type(storage) is StorageRecord and _counts((offset,)) and _counts(shape) and _counts(strides)
    if not is_right or len(shape) != len(strides):
        raise _Refused("makes a tensor from something other than a storage, an offset, sizes and strides")
    dtype = next((one.name.removeprefix("torch.") for one in rest if type(one) is Global), storage.dtype)
    metadata = rest[-1] if len(rest) > 2 and type(rest[-1]) is not Global else None
    return StoredTensor(storage, dtype, offset, shape, strides, bool(metadata))


def _size(counts: Any) -> tuple[int, ...]:
    if not _counts(counts):
        raise _Refused("makes a shape from something other than sizes")
    shape: tuple[int, ...] = counts
    return shape


def _parameter(tensor: object, *_: object) -> StoredTensor:
    if type(tensor) is not StoredTensor:
        raise _Refused("makes a parameter of something other than a tensor")
    return tensor


def _typed(function: Any, kind: Any, arguments: Any, _: object) -> StoredTensor:
    """Rebuild a tensor or parameter with Python attributes."""
    if kind.name not in _HARMLESS[:2] or function.name not in _TENSORS:
        raise _Refused("makes a tensor of a class of its own")
    return _TENSORS[function.name](*arguments)


_TENSORS: dict[str, Callable[..., StoredTensor]] = {
    **dict.fromkeys((f"torch._utils._rebuild_tensor{v}" for v in ("", "_v2", "_v3")), _tensor),
    **dict.fromkeys((f"torch._utils._rebuild_parameter{v}" for v in ("", "_with_state")), _parameter),
}
_CALLS: dict[str, Callable[..., object]] = {
    **_TENSORS,
    "torch._tensor._rebuild_from_type_v2": _typed,
    "collections.OrderedDict": lambda: _Dict(),
    "torch.Size": _size,
}
