"""Read pickles of strangers as data: nothing that they name is imported or called.

Python's unpickler written in Python runs them over inert classes: a global is its name (``Opaque``), an
object a record of what it was made from (``InertObject``), a tensor a view of a storage (``StoredTensor``).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

from zerostart.checkpoint.catalog import TORCH_NAMES
from zerostart.checkpoint.strict_json import DAMAGED, shown
from zerostart.errors import CheckpointError

#: Maximum number of classes that a pickle names.
MAX_NAMES = 1000
#: Maximum number of dimensions of a tensor; torch's own operators stop at 64.
MAX_DIMENSIONS = 64
#: Members of containers that may be referred to again, in addition to eight for each byte of the pickle.
FREE_MEMBERS = 1 << 20
_MAX_COUNT = 2**63 - 1

#: Element types in torch's spelling, by their own names and by the storage classes that stand for them.
_DTYPES = {
    f"torch.{name}": name
    for name in (*TORCH_NAMES, "complex32", "complex128", "float4_e2m1fn_x2", "qint8", "qint32", "quint8")
}
_STORAGES = {
    "torch.storage.UntypedStorage": "uint8", "torch.UntypedStorage": "uint8", "torch.ByteStorage": "uint8",
    "torch.CharStorage": "int8", "torch.ShortStorage": "int16", "torch.IntStorage": "int32",
    "torch.LongStorage": "int64", "torch.HalfStorage": "float16", "torch.BFloat16Storage": "bfloat16",
    "torch.FloatStorage": "float32", "torch.DoubleStorage": "float64", "torch.BoolStorage": "bool",
    "torch.ComplexFloatStorage": "complex64", "torch.ComplexDoubleStorage": "complex128",
}  # fmt: skip
#: Globals that a file of weights may name although no weight depends on their values.
_HARMLESS = (
    "torch.Tensor", "torch.nn.parameter.Parameter", "collections.Counter", "torch.device",
    "torch.serialization._get_layout", "_codecs.encode",
    *(f"{m}.{n}" for m in ("builtins", "__builtin__") for n in ("set", "bytearray", "complex")),
)  # fmt: skip


class Storage(NamedTuple):
    """Record ``data/key`` of the archive: ``numel`` elements of ``dtype`` (torch's spelling)."""

    key: str
    dtype: str
    numel: int


class StoredTensor(NamedTuple):
    """A view of a storage; ``offset`` and ``strides`` count elements of ``dtype``."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    #: True for the conjugate or the negative of what is stored.
    bits: bool


class _Refused(Exception):
    """A pickle does what no checkpoint does."""


class Opaque(type):
    """A global: its ``name``, and nothing of what is behind it."""

    name: str
    callable: bool

    def __call__(cls, *arguments: object) -> object:
        """Return what a known call makes of records, otherwise an ``InertObject``."""
        if (call := _CALLS.get(cls.name)) is not None:
            return call(*arguments)
        if not cls.callable:
            raise _Refused(f"calls {shown(cls.name)}")
        return super().__call__(*arguments)


class InertObject:
    """The record of a call of ``name`` with ``arguments``, and of the ``state`` that was set after it."""

    __slots__ = ("arguments", "state")
    arguments: tuple[Any, ...]
    state: Any
    name: str

    def __new__(cls, *arguments: object, **keywords: object) -> InertObject:
        made = super().__new__(cls)
        made.arguments, made.state = arguments, keywords or None
        return made

    def __setstate__(self, state: object) -> None:
        self.state = state

    def get(self, key: str) -> Any:
        """Return the attribute ``key`` of the state; None without one."""
        for part in self.state if type(self.state) is tuple else (self.state,):
            if isinstance(part, dict) and key in part:
                return part[key]
        return None

    def append(self, items: object) -> None:
        """Ignore the items of a list or dictionary class."""

    extend = append

    def __setitem__(self, key: object, value: object) -> None:
        self.append(value)


class _Dict(dict[Any, Any]):
    """A dictionary; ``noted`` is what torch notes next to a state dict (``_metadata``)."""

    __slots__ = ("noted",)

    def __setitem__(self, key: object, value: object) -> None:
        # Tuples are hashed by recursion in C; hashes of long integers can be made to collide.
        short = type(key) is int and key.bit_length() <= 64
        if not short and not isinstance(key, (str, float, bool, bytes, type(None), Opaque, InertObject)):
            raise _Refused(f"has a dictionary with a {type(key).__name__} for a key")
        super().__setitem__(key, value)

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict) and isinstance(noted := state.get("_metadata"), dict):
            self.noted = noted


_CONTAINERS = (_Dict, list, tuple)


def plain_versions(noted: Mapping[object, object]) -> dict[str, dict[str, object]]:
    """Return the numbers and strings that torch notes of each module (``_metadata``)."""
    kept = (int, float, str, bool, type(None))
    return {
        name: {key: value for key, value in entry.items() if type(key) is str and type(value) in kept}
        for name, entry in noted.items()
        if type(name) is str and isinstance(entry, Mapping)
    }


#: What Python's unpickler raises for a pickle that makes no sense to it, or to what is called.
_DAMAGE = (
    *(pickle.PickleError, ArithmeticError, AttributeError, EOFError, LookupError),
    *(MemoryError, TypeError, ValueError),
)  # fmt: skip


def read_inert_pickle(raw: bytes, path: str, weights: bool = False) -> Any:
    """Read a pickle into containers, primitives, StoredTensor, Storage, Opaque and InertObject.

    Sets are lists, a ``torch.Size`` is a ``tuple``. ``path`` serves messages. A file of ``weights`` may name
    nothing but what ``torch.save`` writes of tensors and plain containers.
    Raises CheckpointError where the pickle is damaged, or refused.
    """
    try:
        value = _Unpickler(raw, weights).load()
        _check_unfolded(value, FREE_MEMBERS + 8 * len(raw))
        return value
    except _Refused as error:
        raise CheckpointError(
            f"{path}: the pickle of the weights {error}; none of its code was run. If you trust where "
            "the file comes from, load it with torch.load(..., weights_only=False) and save its "
            "tensors as safetensors"
        ) from None
    except _DAMAGE as error:
        raise CheckpointError(
            f"{path}: the pickle in the file is damaged ({shown(str(error))}): {DAMAGED}"
        ) from error


#: The types that mypy knows of it are those of the unpickler in C.
_InPython: Any = pickle._Unpickler


# The unpickler in C allocates as many entries of its memo as an index says; this one has a dictionary.
class _Unpickler(_InPython):  # type: ignore[misc]
    def __init__(self, raw: bytes, weights: bool) -> None:
        super().__init__(io.BytesIO(raw))
        self._weights = weights
        self._named: dict[str, Opaque] = {}
        self._free = FREE_MEMBERS + 8 * len(raw)

    def find_class(self, module: str, name: str) -> object:
        name = f"{module}.{name}"
        if name not in self._named:
            if self._weights and not any(name in known for known in (_CALLS, _STORAGES, _DTYPES, _HARMLESS)):
                raise _Refused(f"names {shown(name)}, which is code and no part of plain tensors")
            if len(self._named) == MAX_NAMES:
                raise _Refused(f"names more than {MAX_NAMES} classes")
            about = {"__slots__": (), "name": name, "callable": not self._weights or name in _HARMLESS}
            self._named[name] = Opaque("Opaque", (InertObject,), about)
        return self._named[name]

    def persistent_load(self, pid: object) -> Storage:
        match pid:
            case ("storage", Opaque(name=name), str(key), str(), int(numel)) if (
                name in _STORAGES and 0 <= numel <= _MAX_COUNT
            ):
                return Storage(key, _STORAGES[name], numel)
        raise _Refused("refers to something outside it that is not a storage")

    # A few bytes may refer to a container of millions, and whoever goes through it does so each time.
    def _get(self, load: Callable[[_Unpickler], None]) -> None:
        load(self)
        item = self.stack[-1]
        self._free -= len(item) if isinstance(item, (tuple, list, dict)) else 0
        self._free -= len(item) // 64 if isinstance(item, (str, bytes)) else 0
        if self._free < 0:
            raise _Refused("refers to the same containers over and over")

    def _refuse(self) -> None:
        raise _Refused("holds an instruction that neither torch.save nor pickle.dump writes")

    def _load_long(self) -> None:
        self.append(int.from_bytes(self.read(self.read(1)[0]), "little", signed=True))

    _read: ClassVar[dict[int, Any]] = _InPython.dispatch
    dispatch: ClassVar[dict[int, Any]] = dict.fromkeys(range(256), _refuse)
    # Instructions of protocol 2, and those that protocols 3 to 5 add.
    for _code in b"(N\x88\x89)]\x85\x86\x87tRbaesu0QKMJGXcqr\x80." + b"\x81\x92\x93\x94\x95\x8c\x8dCB\x8e":
        dispatch[_code] = _read[_code]
    for _code in b"hj":
        dispatch[_code] = lambda self, load=_read[_code]: self._get(load)
    dispatch[0x8A] = _load_long
    dispatch[ord("}")] = lambda self: self.append(_Dict())
    # Sets are read as lists: nothing of a stranger is hashed.
    dispatch[0x8F], dispatch[0x90], dispatch[0x91] = _read[ord("]")], _read[ord("e")], _read[ord("l")]


def _check_unfolded(value: object, limit: int) -> None:
    members: dict[int, int] = {}  # of each container, its own and those inside them; 0: not yet counted
    pending = [value]
    while pending:
        item: Any = pending[-1]
        inside = (*item, *item.values()) if type(item) is _Dict else item
        held = [one for one in inside if type(one) in _CONTAINERS] if type(item) in _CONTAINERS else []
        if id(item) not in members:
            members[id(item)] = 0
            pending += [one for one in held if id(one) not in members]
            continue
        pending.pop()
        if not members[id(item)]:
            if not all(members[id(one)] for one in held):
                raise _Refused("holds a container that holds itself")
            count = len(inside) if type(item) in _CONTAINERS else 0
            members[id(item)] = 1 + count + sum(members[id(one)] for one in held)
        if members[id(item)] > limit:
            raise _Refused(f"holds containers in one another, with more than {limit} members in all")


def _size(sizes: Any) -> tuple[int, ...]:
    if not _counts(sizes):
        raise _Refused("makes a torch.Size of something other than sizes")
    return tuple(sizes)


def _counts(values: object) -> bool:
    return (
        type(values) is tuple
        and len(values) <= MAX_DIMENSIONS
        and all(type(v) is int and 0 <= v <= _MAX_COUNT for v in values)
    )


def _tensor(*arguments: Any) -> StoredTensor:
    """_rebuild_tensor(storage, offset, size, stride) and _v2(..., requires_grad, hooks[, metadata])."""
    if len(arguments) not in (4, 6, 7):
        raise _Refused(f"makes a tensor from {len(arguments)} values")
    storage, offset, shape, strides = arguments[:4]
    right = type(storage) is Storage and _counts((offset,)) and _counts(shape) and _counts(strides)
    if not right or len(shape) != len(strides):
        raise _Refused("makes a tensor from something other than a storage, an offset, sizes and strides")
    return StoredTensor(storage, storage.dtype, offset, shape, strides, bool(arguments[6:] and arguments[6]))


def _tensor_v3(*arguments: object) -> StoredTensor:
    """_rebuild_tensor_v3: as v2, over bytes, with the dtype before the metadata."""
    dtype = arguments[6].name if len(arguments) > 6 and type(arguments[6]) is Opaque else ""
    if dtype not in _DTYPES:
        raise _Refused(f"makes a tensor from {len(arguments)} values, of the type {shown(dtype)}")
    return _tensor(*arguments[:6], *arguments[7:])._replace(dtype=_DTYPES[dtype])


def _parameter(tensor: object = None, *_: object) -> StoredTensor:
    """_rebuild_parameter(data, ...): the tensor in it."""
    if type(tensor) is not StoredTensor:
        raise _Refused("makes a parameter of something other than a tensor")
    return tensor


def _typed(function: object, kind: object, arguments: object, _: object) -> StoredTensor:
    """_rebuild_from_type_v2: a tensor with Python attributes."""
    named = type(function) is type(kind) is Opaque and type(arguments) is tuple
    if named and kind.name in _HARMLESS[:2] and function.name in _TENSORS:  # type: ignore[attr-defined]
        return _TENSORS[function.name](*arguments)  # type: ignore[attr-defined,misc]
    raise _Refused("makes a tensor of a class of its own")


_TENSORS = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
}
_CALLS: dict[str, Callable[..., object]] = {
    **_TENSORS,
    "torch._tensor._rebuild_from_type_v2": _typed,
    "collections.OrderedDict": lambda: _Dict(),
    "torch.Size": _size,
}
