"""Pickles out of files that nobody vouches for, read as data: nothing that they name is imported or called.

Python's own unpickler runs them over inert classes: a global is its name (``Opaque``), an object a record of
what it was made from (``InertObject``), a tensor a view of a storage (``StoredTensor``). Three things that
it leaves open are settled before it starts (``_checked``): it allocates as many entries of its memo as an
instruction says, it knows no limit on instructions, and it hashes keys in C, tuples in tuples by recursion.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from zerostart.checkpoint.catalog import TORCH_NAMES
from zerostart.checkpoint.strict_json import DAMAGED, shown
from zerostart.errors import CheckpointError

#: Bytes of instructions, strings aside: a tensor takes about 75, so that it is enough for 200 000 of them.
MAX_INSTRUCTIONS = 16_000_000
#: The same of a training state's description; and most classes that a pickle names.
MAX_STATE_INSTRUCTIONS, MAX_NAMES = 1 << 26, 1000
#: Most dimensions of a tensor, and members of a tuple that is a key. torch's own operators stop at 64.
MAX_DIMENSIONS = 64
_MAX_COUNT = 2**63 - 1
#: Members that calls may copy, or that occur again, whatever the length of the pickle.
_FREE = 1 << 20
#: Most keys of a dictionary that are tuples of one hash: of numbers any number are, as of -1 and -2.
_MAX_OF_ONE_HASH = 64

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
#: Classes that are no more than a tensor.
_PLAIN = ("torch.Tensor", "torch.nn.parameter.Parameter")
#: Harmless globals whose values no weight depends on.
_HARMLESS = (
    *_PLAIN, "collections.Counter", "torch.device", "torch.serialization._get_layout", "_codecs.encode",
    *(f"{m}.{n}" for m in ("builtins", "__builtin__") for n in ("set", "bytearray", "complex")),
)  # fmt: skip


# Both are tuples: the attributes of most other objects a pickle could set after they were checked.
class Storage(NamedTuple):
    """Record ``data/key`` of the archive: ``numel`` elements of ``dtype`` (torch's spelling)."""

    key: str
    dtype: str
    numel: int


class StoredTensor(NamedTuple):
    """A view of a storage."""

    storage: Storage
    dtype: str
    #: In elements of ``dtype``, and so ``strides``.
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    #: Whether it stands for the conjugate or the negative of what is stored.
    bits: bool


class Opaque(type):
    """A global: its ``name``, and nothing of what is behind it."""

    name: str
    callable: bool
    free: list[int]

    def __call__(cls, *arguments: object) -> object:
        """What one of the known calls makes of records, else a ``InertObject``."""
        # Known calls first: they make records of tensors, and run nothing of the library that they are named
        # after.
        if (call := _CALLS.get(cls.name)) is not None:
            return call(*arguments)
        if not cls.callable:
            raise _Refused(f"calls {shown(cls.name)}")
        return super().__call__(*arguments)


class InertObject:
    """What calling ``name`` with ``arguments`` would have made, with the ``state`` that it was then given."""

    __slots__ = ("arguments", "state")
    arguments: tuple[Any, ...]
    state: Any
    name: str
    free: list[int]

    def __new__(cls, *arguments: object, **keywords: object) -> InertObject:
        """Copy no more of arguments than the whole pickle may."""
        # A memoised tuple can be handed to thousands of calls in a few bytes each: what all of them copy
        # together is counted. The list is one for all classes of the pickle.
        cls.free[0] -= len(arguments) + len(keywords)
        if cls.free[0] < 0:
            raise _Refused("copies the same containers over and over")
        made = super().__new__(cls)
        made.arguments, made.state = arguments, keywords or None
        return made

    def __setstate__(self, state: object) -> None:
        self.state = state

    def get(self, key: str) -> Any:
        """The attribute ``key`` of its state (those of slots are a second part of it), None without one."""
        for part in self.state if type(self.state) is tuple else (self.state,):
            if isinstance(part, dict) and key in part:
                return part[key]
        return None

    def append(self, items: object) -> None:
        """A list or dictionary of a class of its own takes its items after it is made: they are left."""

    extend = append

    def __setitem__(self, key: object, value: object) -> None:
        self.append(value)


class _Dict(dict[Any, Any]):
    """A dictionary; ``noted`` is what torch notes beside a state dict (``_metadata``)."""

    __slots__ = ("_hashes", "noted")
    _hashes: dict[int, int]

    def __setitem__(self, key: object, value: object) -> None:
        if type(key) is not str:
            parts = key if type(key) is tuple else (key,)
            if len(parts) > MAX_DIMENSIONS or not all(map(_hashes_soon, parts)):
                raise _Refused(f"has a dictionary with a {type(key).__name__} for a key")
            # Hashes of tuples can be made to collide at will, which makes each insertion as slow as the
            # dictionary is long.
            if parts is key:
                self._count(hash(key))
        super().__setitem__(key, value)

    def _count(self, number: int) -> None:
        """Refuse a tuple where too many have its hash: each is compared with all of them."""
        if not hasattr(self, "_hashes"):
            self._hashes = {}
        self._hashes[number] = count = self._hashes.get(number, 0) + 1
        if count > _MAX_OF_ONE_HASH:
            raise _Refused(f"has a dictionary with more than {_MAX_OF_ONE_HASH} keys of one hash")

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict) and isinstance(noted := state.get("_metadata"), dict):
            self.noted = noted


def _hashes_soon(key: object) -> bool:
    if type(key) is int:
        return key.bit_length() <= 64  # of longer ones any number have the same hash
    return type(key) in (str, float, bool, bytes, type(None), Opaque) or isinstance(key, InertObject)


def plain_versions(noted: Mapping[object, object]) -> dict[str, dict[str, object]]:
    """What torch notes of modules (``_metadata``): for each name numbers and strings by their names."""
    kept = (int, float, str, bool, type(None))
    return {
        name: {key: value for key, value in entry.items() if type(key) is str and type(value) in kept}
        for name, entry in noted.items()
        if type(name) is str and isinstance(entry, Mapping)
    }


class _Refused(Exception):
    """What a pickle does that none of those does which are read."""


#: What Python's unpickler raises where a pickle makes no sense to it, or to what is called.
_DAMAGE = (
    pickle.PickleError, ArithmeticError, AttributeError, EOFError, LookupError, TypeError, ValueError
)  # fmt: skip


def read_inert_pickle(raw: bytes, path: str, weights: bool = False) -> Any:
    """The object in a pickle: containers, primitives, StoredTensor, Storage, Opaque, and InertObject.

    Sets are lists, a ``torch.Size`` is a ``tuple``. ``path`` serves messages. Of a file of ``weights`` it is
    nothing but what ``torch.save`` writes of tensors and plain containers, and no other global is named.
    Raises CheckpointError where the pickle is damaged, or refused.
    """
    try:
        value = _Unpickler(_checked(raw, weights), weights).load()
        _check_unfolded(value, _FREE + 8 * len(raw))
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


class _Unpickler(pickle.Unpickler):
    """Python's, to whom a global is an Opaque; of ``weights``: one that tensors need."""

    def __init__(self, raw: bytes, weights: bool) -> None:
        super().__init__(io.BufferedReader(io.BytesIO(raw)))
        self._weights = weights
        self._named: dict[str, Opaque] = {}
        self._free = [_FREE + len(raw)]

    def find_class(self, module: str, name: str) -> object:
        name = f"{module}.{name}"
        # A class of its own for each name, made here: nothing is imported to have it.
        if name not in self._named:
            if self._weights and not any(name in known for known in (_CALLS, _STORAGES, _DTYPES, _HARMLESS)):
                raise _Refused(f"names {shown(name)}, which is code and no part of plain tensors")
            if len(self._named) == MAX_NAMES:
                raise _Refused(f"names more than {MAX_NAMES} classes")
            callable_ = not self._weights or name in _HARMLESS
            about = {"__slots__": (), "name": name, "callable": callable_, "free": self._free}
            self._named[name] = Opaque("Opaque", (InertObject,), about)
        return self._named[name]

    def persistent_load(self, pid: object) -> Storage | _Dict:
        match pid:
            case None:  # a dictionary, as ``_INSTEAD_2`` spells it
                return _Dict()
            case ("storage", Opaque(name=name), str(key), str(), int(numel)) if (
                name in _STORAGES and 0 <= numel <= _MAX_COUNT
            ):
                return Storage(key, _STORAGES[name], numel)
        raise _Refused("refers to something outside it that is not a storage")


#: Instructions, with their arguments, that nothing is asked about; %b: what the index of a memo ends with.
_PROTOCOL_2 = rb"[(N\x88\x89)\]\x85-\x87tRabseuQ]|[\x80Kqh].|M..|[Jj]....|G.{8}|r..%b"
_PROTOCOL_4 = _PROTOCOL_2 + rb"|[\x81\x92-\x940-2]"
#: Bytes of a length, after which so much follows.
_LENGTHS_2 = {ord("X"): 4, 0x8A: 1}
_LENGTHS_4 = {**_LENGTHS_2, 0x8C: 1, 0x8D: 8, ord("C"): 1, ord("B"): 4, 0x8E: 8, 0x8B: 4}
#: What is read in the place of others: dictionaries that check their keys, and lists for sets.
_INSTEAD_2 = {ord("}"): b"NQ"}
_INSTEAD_4 = {**_INSTEAD_2, 0x8F: b"]", 0x90: b"e", 0x91: b"l"}


def _checked(raw: bytes, weights: bool) -> bytes:
    """The pickle up to its end, for Python's unpickler; what is no more than a frame is left out."""
    lengths, instead = (_LENGTHS_2, _INSTEAD_2) if weights else (_LENGTHS_4, _INSTEAD_4)
    # So an index into the memo beyond half the pickle's length is a trick to have gigabytes allocated: the
    # pattern below takes no 4-byte index whose upper half is larger than this.
    highest = len(raw) >> 16  # to remember a value takes two bytes or more
    index = b"[\\x00-\\x%02x][\\x00-\\x%02x]" % (min(highest, 255), highest >> 8)
    simple = re.compile(b"(?:%b)*+" % ((_PROTOCOL_2 if weights else _PROTOCOL_4) % index), re.DOTALL)
    limit = MAX_INSTRUCTIONS if weights else MAX_STATE_INSTRUCTIONS
    parts: list[bytes] = []
    at = begin = count = 0
    while True:
        # A run of plain instructions in one step of the expression (possessive, `*+`: it never goes back).
        end = run.end() if (run := simple.match(raw, at)) else at
        count += end - at + 1
        if count > limit:
            raise _Refused(f"has more than {limit} bytes of instructions")
        code, at = raw[end], end + 1
        if size := lengths.get(code):
            length = int.from_bytes(raw[at : at + size], "little")
            at += size + length
            if at > len(raw) or (code in b"\x8a\x8b" and length > 255):
                raise ValueError(f"something of {length} bytes at byte {end}")
        elif code == ord("c"):
            at = raw.index(b"\n", raw.index(b"\n", at, at + 1024) + 1, at + 2048) + 1
        elif code == ord("."):
            return b"".join((*parts, raw[begin:at]))
        # 0x95 (FRAME) says how long a part is, by which the unpickler would allocate: it and its 8 bytes are
        # dropped.
        elif code in instead or (code == 0x95 and not weights):
            parts += (raw[begin:end], instead.get(code, b""))
            begin = at = at + 8 * (code == 0x95)
        else:
            raise _Refused(
                f"holds instruction {shown(chr(code))}, which torch.save by default does not write"
            )


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


def _typed(
    function: object, kind: object, arguments: object, attributes: object
) -> StoredTensor | InertObject:
    """_rebuild_from_type_v2: a tensor with Python attributes; one of a class of its own is a record."""
    if type(function) is type(kind) is Opaque and type(arguments) is tuple:
        if kind.name in _PLAIN and function.name in _TENSORS:
            return _TENSORS[function.name](*arguments)
        if kind.callable and kind.name not in _HARMLESS:
            made: InertObject = type.__call__(kind, *arguments)
            made.state = attributes
            return made
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


def _check_unfolded(value: object, limit: int) -> None:
    """Refuse containers that hold one another so often that nobody could print or copy them.

    A list that holds another one twice, which holds a third one twice, takes a few bytes for each, and twice
    the time with each. What objects hold is asked for by its name, and nobody goes through it as a whole.
    """
    weights: dict[int, int] = {}  # negative: begun
    pending: list[tuple[Any, list[object] | None]] = [(value, None)]
    total = 0
    while pending:
        item, inside = pending.pop()
        if inside is not None:
            each = [weights[id(one)] for one in inside]
            if min(each) < 0:
                raise _Refused("holds a container that holds itself")
            weights[id(item)] = total = sum(each) - weights[id(item)]
        elif id(item) not in weights:
            members = (
                (*item, *item.values())
                if type(item) is _Dict
                else item
                if type(item) in (list, tuple)
                else ()
            )
            total = 1 + len(members) + sum([len(one) for one in members if type(one) in (str, bytes)]) // 64
            inside = [one for one in members if type(one) in (_Dict, list, tuple)]
            weights[id(item)] = -total if inside else total
            if inside:
                pending.append((item, inside))
                pending += [(one, None) for one in inside if id(one) not in weights]
        if total > limit:
            raise _Refused(f"holds containers in one another, with more than {limit} members in all")
