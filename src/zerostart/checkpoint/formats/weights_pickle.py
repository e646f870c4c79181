"""The pickle inside a torch file, read as data: nothing that it names is ever imported or called.

A pickle is a program for a small stack machine. This one runs it with inert stand-ins: a global is its name,
calling one of a dozen known globals makes a record of the arguments, and everything else is refused. The
instructions are those that ``torch.save`` writes (protocol 2), as in torch's own ``weights_only`` reader.
Memory and time are bounded by the number of instructions, and by the length of the pickle what they copy and
how many members, each as often as it occurs, what is given on has. The stack of the interpreter is not used
for nesting, and no value is compared, hashed or printed unless it is of a primitive type.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from zerostart.checkpoint.formats.pickle_records import (
    DTYPES,
    INERT,
    PLAIN,
    STORAGES,
    VERSIONS,
    Opaque,
    Storage,
    StoredTensor,
    plain_versions,
)
from zerostart.checkpoint.formats.unfolding import CONTAINERS, check_unfolded
from zerostart.checkpoint.strict_json import DAMAGED, shown
from zerostart.errors import CheckpointError

__all__ = [
    "CALLS",
    "INSTRUCTIONS",
    "TYPED",
    "VERSIONS",
    "Machine",
    "Opaque",
    "Storage",
    "StoredTensor",
    "plain_versions",
    "read_weights_pickle",
]

#: A tensor takes about 40 instructions: enough for 200 000 tensors, optimizer state included.
MAX_INSTRUCTIONS = 8_000_000
_MAX_COUNT = 2**63 - 1
_KEY_TYPES = (str, int, float, bool, bytes, type(None))
#: Most dimensions of a tensor, and members of a tuple that is a key. torch's own operators stop at 64.
MAX_DIMENSIONS = 64
#: Members that may be copied, or occur again, whatever the length of the pickle.
_FREE = 1 << 20


def read_weights_pickle(raw: bytes, path: str) -> Any:
    """The object in a pickle: dictionaries, lists, tuples, primitives, StoredTensor, Storage and Opaque.

    An OrderedDict is a ``dict``, a ``torch.Size`` a ``tuple``. ``path`` serves messages. Raises
    CheckpointError for anything that ``torch.save`` of tensors and plain containers does not write.
    """
    return Machine(raw, path).read()


class Machine:
    """Stack, marks and memo of one run; ``instructions`` are those that it knows, ``limit`` most of them."""

    instructions: Mapping[int, Callable[[Any], None]]
    limit = MAX_INSTRUCTIONS

    def __init__(self, raw: bytes, path: str) -> None:
        self.at = 0
        self._raw = raw
        self._path = path
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._copied = 0
        self._shares = False

    def read(self) -> Any:
        """The object in the pickle; raises CheckpointError where it is damaged, or refused."""
        try:
            value = self._run()
            if self._shares:
                check_unfolded(value, _FREE + 8 * len(self._raw), self.inside, self.refuse)
            return value
        except (IndexError, KeyError, struct.error, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{self._path}: the pickle in it is damaged at byte {self.at} ({type(error).__name__}): "
                f"{DAMAGED}"
            ) from error

    def _run(self) -> Any:
        """Step through the instructions up to STOP."""
        raw, table = self._raw, self.instructions
        count = 0
        while True:
            count += 1
            if count > self.limit:
                self.refuse(f"has more than {self.limit} instructions")
            code = raw[self.at]
            self.at += 1
            if code == _STOP:
                return self._stack.pop()
            step = table.get(code)
            if step is None:
                self.refuse(
                    f"holds instruction {shown(chr(code))}, which torch.save by default does not write"
                )
            step(self)

    def spend(self, members: int) -> None:
        """Count members that an instruction copies; raises CheckpointError for more than a pickle needs."""
        self._copied += members
        if self._copied > _FREE + len(self._raw):
            self.refuse("copies the same containers over and over")

    def inside(self, item: Any) -> tuple[Any, ...]:
        """What something that is no container holds, which is looked at by itself."""
        return ()

    def refuse(self, reason: str) -> NoReturn:
        """Raise CheckpointError with the way out."""
        raise CheckpointError(
            f"{self._path}: the pickle of the weights {reason}; nothing of it was run. If you trust where it "
            "comes from, load it with torch.load(..., weights_only=False) and save its tensors as safetensors"
        )

    def take(self, length: int) -> bytes:
        """The next bytes of the pickle; raises IndexError at its end."""
        end = self.at + length
        if end > len(self._raw):
            raise IndexError("the pickle ends here")
        part = self._raw[self.at : end]
        self.at = end
        return part

    def number(self, form: struct.Struct) -> int:
        """The next integer, of a fixed form."""
        value: int = form.unpack(self.take(form.size))[0]
        return value

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self._stack.append(value)

    def line(self) -> str:
        """What follows up to the end of the line; raises IndexError without one."""
        end = self._raw.find(b"\n", self.at, self.at + 1024)
        if end < 0:
            raise IndexError("a name without end")
        return self.take(end + 1 - self.at)[:-1].decode("utf-8")

    def protocol(self) -> None:
        """PROTO: read over, since the instructions themselves tell more."""
        self.take(1)

    def mark(self) -> None:
        """MARK: begin a stack of its own."""
        self._marks.append(self._stack)
        self._stack = []

    def to_mark(self) -> list[Any]:
        """The values since the last mark."""
        items = self._stack
        self._stack = self._marks.pop()
        return items

    def tuple_of(self, count: int) -> None:
        """Make a tuple of the last ``count`` values; raises IndexError if there are fewer."""
        if len(self._stack) < count:
            raise IndexError("stack underflow")
        self._stack[-count:] = [tuple(self._stack[-count:])]

    def put(self, index: int) -> None:
        """Remember the last value under a number."""
        self._memo[index] = self._stack[-1]

    def get(self, index: int) -> None:
        """Put a remembered value on the stack."""
        value = self._memo[index]
        self._shares = self._shares or type(value) in CONTAINERS
        self._stack.append(value)

    def extend(self, items: list[Any]) -> None:
        """Append to the list on the stack."""
        target = self._stack[-1]
        if type(target) is not list:
            self.refuse(f"appends to a {type(target).__name__}")
        target.extend(items)  # which were on the stack, each by an instruction of its own

    def set_items(self, items: list[Any]) -> None:
        """Fill the dictionary on the stack."""
        target = self._stack[-1]
        if type(target) is not dict:
            self.refuse(f"sets items of a {type(target).__name__}")
        self.fill(target, items)

    def fill(self, target: dict[Any, Any], items: list[Any]) -> None:
        """Set keys and values that follow each other in ``items``."""
        if len(items) % 2:
            self.refuse("has a dictionary with a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not self.is_key(key):
                self.refuse(f"has a dictionary with a {type(key).__name__} for a key")
            target[key] = value

    def is_key(self, key: Any) -> bool:
        """Whether ``key`` may be one of a dictionary."""
        return type(key) in _KEY_TYPES

    def name_global(self) -> None:
        """GLOBAL: a name, and never the object behind it."""
        name = f"{self.line()}.{self.line()}"
        prefix, _, last = name.rpartition(".")
        known = name in CALLS or name in STORAGES or name in INERT
        if not known and not (prefix == "torch" and last in DTYPES):
            self.refuse(f"names {shown(name)}, which is code, and no part of plain tensors")
        self.push(Opaque(name))

    def reduce(self) -> None:
        """REDUCE: one of the known calls, made on records."""
        arguments, function = self._stack.pop(), self._stack.pop()
        if type(function) is not Opaque or type(arguments) is not tuple:
            self.refuse(f"calls a {type(function).__name__}")
        call = CALLS.get(function.name)
        if call is not None:
            self.push(call(self, arguments))
        elif function.name in INERT:
            self.push(Opaque(f"{function.name}()"))
        else:
            self.refuse(f"calls {shown(function.name)}")

    def build(self) -> None:
        """BUILD: attributes of an OrderedDict; a state dict's ``_metadata`` is kept under ``VERSIONS``."""
        state, target = self._stack.pop(), self._stack[-1]
        if type(target) is not dict:
            self.refuse(f"sets the state of a {type(target).__name__}")
        noted = state.get("_metadata") if type(state) is dict else None
        if type(noted) is dict:
            self.spend(sum(1 + len(entry) for entry in noted.values() if type(entry) is dict))
            target[VERSIONS] = plain_versions(noted)

    def persistent(self) -> None:
        """BINPERSID: a storage."""
        match self._stack.pop():
            case ("storage", Opaque(name), str(key), str(), int(numel)) if (
                name in STORAGES and 0 <= numel <= _MAX_COUNT
            ):
                self.push(Storage(key, STORAGES[name], numel))
            case _:
                self.refuse("refers to something outside it that is not a storage")


def _ordered(machine: Machine, arguments: tuple[Any, ...]) -> dict[Any, Any]:
    """OrderedDict, empty or of a list of pairs as Python 2 wrote it."""
    made: dict[Any, Any] = {}
    pairs = arguments[0] if len(arguments) == 1 and type(arguments[0]) is list else arguments
    machine.spend(len(pairs))  # one list may be the argument of any number of calls
    for pair in pairs:
        if type(pair) not in (list, tuple) or len(pair) != 2:
            machine.refuse("makes an OrderedDict of something other than pairs")
        machine.fill(made, list(pair))
    return made


def _size(machine: Machine, arguments: tuple[Any, ...]) -> tuple[int, ...]:
    if len(arguments) != 1 or not _counts(arguments[0]):
        machine.refuse("makes a torch.Size of something other than sizes")
    return tuple(arguments[0])


def _counts(values: Any) -> bool:
    return (
        type(values) is tuple
        and len(values) <= MAX_DIMENSIONS
        and all(type(v) is int and 0 <= v <= _MAX_COUNT for v in values)
    )


def _tensor(machine: Machine, arguments: tuple[Any, ...]) -> StoredTensor:
    """_rebuild_tensor(storage, offset, size, stride) and _v2(..., requires_grad, hooks[, metadata])."""
    if len(arguments) not in (4, 6, 7):
        machine.refuse(f"makes a tensor from {len(arguments)} values")
    return _view(machine, arguments[:4], None, len(arguments) == 7 and bool(arguments[6]))


def _tensor_v3(machine: Machine, arguments: tuple[Any, ...]) -> StoredTensor:
    """_rebuild_tensor_v3: as v2, over bytes, with the dtype before the metadata."""
    if len(arguments) not in (7, 8) or type(arguments[6]) is not Opaque:
        machine.refuse(f"makes a tensor from {len(arguments)} values")
    prefix, _, dtype = arguments[6].name.rpartition(".")
    if prefix != "torch" or dtype not in DTYPES:
        machine.refuse(f"makes a tensor of {shown(arguments[6].name)}")
    return _view(machine, arguments[:4], dtype, len(arguments) == 8 and bool(arguments[7]))


def _view(machine: Machine, arguments: tuple[Any, ...], dtype: str | None, bits: bool) -> StoredTensor:
    storage, offset, shape, strides = arguments
    right = type(storage) is Storage and _counts((offset,)) and _counts(shape) and _counts(strides)
    if not right or len(shape) != len(strides):
        machine.refuse("makes a tensor from something other than a storage, an offset, sizes and strides")
    return StoredTensor(storage, dtype or storage.dtype, offset, shape, strides, bits)


def _parameter(machine: Machine, arguments: tuple[Any, ...]) -> StoredTensor:
    """_rebuild_parameter(data, ...): the tensor in it."""
    if not arguments or type(arguments[0]) is not StoredTensor:
        machine.refuse("makes a parameter of something other than a tensor")
    return arguments[0]


def _with_attributes(machine: Machine, arguments: tuple[Any, ...]) -> StoredTensor:
    """_rebuild_from_type_v2(function, type, arguments, attributes): a tensor with Python attributes."""
    function, kind, inner = arguments[:3] if len(arguments) == 4 else (None, None, None)
    call = _TENSORS.get(function.name) if type(function) is Opaque else None
    if call is None or type(kind) is not Opaque or kind.name not in PLAIN or type(inner) is not tuple:
        machine.refuse("makes a tensor of a class of its own")
    return call(machine, inner)


#: What rebuilds a tensor with a class or attributes of its own.
TYPED = "torch._tensor._rebuild_from_type_v2"
_Call = Callable[[Machine, tuple[Any, ...]], Any]
_TENSORS: dict[str, Callable[[Machine, tuple[Any, ...]], StoredTensor]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
}
CALLS: dict[str, _Call] = {
    **_TENSORS,
    TYPED: _with_attributes,
    "collections.OrderedDict": _ordered,
    "torch.Size": _size,
}

_U8, _U16, _U32, _I32 = (struct.Struct(form) for form in ("<B", "<H", "<L", "<l"))
_F64 = struct.Struct(">d")
_STOP = ord(".")
INSTRUCTIONS: dict[int, Callable[[Machine], None]] = {
    ord(code): step
    for code, step in {
        "\x80": Machine.protocol,
        "(": Machine.mark,
        "t": lambda m: m.push(tuple(m.to_mark())),
        "\x85": lambda m: m.tuple_of(1),
        "\x86": lambda m: m.tuple_of(2),
        "\x87": lambda m: m.tuple_of(3),
        ")": lambda m: m.push(()),
        "]": lambda m: m.push([]),
        "}": lambda m: m.push({}),
        "N": lambda m: m.push(None),
        "\x88": lambda m: m.push(True),
        "\x89": lambda m: m.push(False),
        "J": lambda m: m.push(m.number(_I32)),
        "K": lambda m: m.push(m.number(_U8)),
        "M": lambda m: m.push(m.number(_U16)),
        "\x8a": lambda m: m.push(int.from_bytes(m.take(m.number(_U8)), "little", signed=True)),
        "G": lambda m: m.push(m.number(_F64)),
        "X": lambda m: m.push(m.take(m.number(_U32)).decode("utf-8", "surrogatepass")),
        "q": lambda m: m.put(m.number(_U8)),
        "r": lambda m: m.put(m.number(_U32)),
        "h": lambda m: m.get(m.number(_U8)),
        "j": lambda m: m.get(m.number(_U32)),
        "a": lambda m: m.extend([m._stack.pop()]),
        "e": lambda m: m.extend(m.to_mark()),
        "s": lambda m: m.set_items([m._stack.pop(-2), m._stack.pop()]),
        "u": lambda m: m.set_items(m.to_mark()),
        "c": Machine.name_global,
        "R": Machine.reduce,
        "b": Machine.build,
        "Q": Machine.persistent,
    }.items()
}
Machine.instructions = INSTRUCTIONS
