"""Pickles of whole training states, read as data: objects become records, and nothing is imported or called.

Beside tensors such a pickle holds objects of its engine's classes (a loss scaler, an enumeration, the
description of a layout). Each becomes a ``Made``: the class's name, the arguments and the state, which the
reader of a format looks at or leaves alone. The instructions are those of protocol 2 and of protocol 4, which
``pickle.dump`` writes by default.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from zerostart.checkpoint.formats.pickle_records import PLAIN
from zerostart.checkpoint.formats.weights_pickle import (
    CALLS,
    INSTRUCTIONS,
    MAX_DIMENSIONS,
    TYPED,
    Machine,
    Opaque,
)

__all__ = ["Made", "read_inert_pickle"]

_U64 = struct.Struct("<Q")
#: Most bytes of an integer.
_LONGEST = 255
_U8, _U32, _I32 = struct.Struct("<B"), struct.Struct("<L"), struct.Struct("<l")


class Made:
    """What calling ``name`` with ``arguments`` would have made, with the ``state`` that it was then given."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name = name
        self.arguments = arguments
        self.state: Any = None

    def get(self, key: str) -> Any:
        """The attribute ``key`` of its state, None without one."""
        return self.state.get(key) if type(self.state) is dict else None


def read_inert_pickle(raw: bytes, path: str) -> Any:
    """The object in a pickle: containers, primitives, StoredTensor, Storage, Opaque (a name), and Made.

    Sets are lists. ``path`` serves messages. Raises CheckpointError where the pickle is damaged, or uses
    instructions that no training state needs.
    """
    return _Inert(raw, path).read()


class _Inert(Machine):
    """The machine of weights, to which any global is a name and any call a record."""

    limit = 1 << 26

    def __init__(self, raw: bytes, path: str) -> None:
        super().__init__(raw, path)
        self._looked: set[int] = set()

    def name_global(self) -> None:
        self.push(Opaque(f"{self.line()}.{self.line()}"))

    def stack_global(self) -> None:
        """STACK_GLOBAL: module and name from the stack."""
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            self.refuse("names something by what is no name")
        self.push(Opaque(f"{module}.{name}"))

    def reduce(self) -> None:
        arguments, function = self._stack[-1], self._stack[-2]
        if type(function) is Opaque and function.name in CALLS:
            own = _own_class(self, function.name, arguments)
            if own is None:
                super().reduce()
            else:
                self._stack[-2:] = [own]
            return
        del self._stack[-2:]
        self._made(function, arguments)

    def new_object(self) -> None:
        """NEWOBJ: ``class.__new__(class, *arguments)``."""
        arguments, kind = self._stack.pop(), self._stack.pop()
        self._made(kind, arguments)

    def new_object_with_keywords(self) -> None:
        """NEWOBJ_EX: the same with keyword arguments, which are its state until it is given one."""
        keywords, arguments, kind = self._stack.pop(), self._stack.pop(), self._stack.pop()
        self._made(kind, arguments)
        self._stack[-1].state = keywords

    def _made(self, kind: Any, arguments: Any) -> None:
        if type(kind) is not Opaque or type(arguments) is not tuple:
            self.refuse(f"calls a {type(kind).__name__}")
        self.push(Made(kind.name, arguments))

    def build(self) -> None:
        if type(self._stack[-2]) is Made:
            state = self._stack.pop()
            self._stack[-1].state = state
        else:
            super().build()

    def extend(self, items: list[Any]) -> None:
        # A list or dictionary of a class of its own takes its items after it is made.
        if type(self._stack[-1]) is not Made:
            super().extend(items)

    def set_items(self, items: list[Any]) -> None:
        if type(self._stack[-1]) is not Made:
            super().set_items(items)

    def is_key(self, key: Any) -> bool:
        # Of tuples in tuples a few bytes make more than could ever be hashed.
        parts = key if type(key) is tuple else (key,)
        return len(parts) <= MAX_DIMENSIONS and all(
            type(part) in (Made, Opaque) or super(_Inert, self).is_key(part) for part in parts
        )

    def long_number(self) -> None:
        """LONG4: an integer of any length, of which none here needs more than LONG1 could hold."""
        length = self.number(_I32)
        if not 0 <= length <= _LONGEST:
            self.refuse(f"has an integer of {length} bytes")
        self.push(int.from_bytes(self.take(length), "little", signed=True))

    def frame(self) -> None:
        """FRAME: how much follows, which nobody needs to know."""
        self.take(8)

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def inside(self, item: Any) -> tuple[Any, ...]:
        if type(item) is not Made or id(item) in self._looked:
            return ()
        self._looked.add(id(item))
        return (item.arguments, item.state)

    def discard(self) -> None:
        self._stack.pop()

    def discard_to_mark(self) -> None:
        self.to_mark()

    def duplicate(self) -> None:
        self._shares = True
        self._stack.append(self._stack[-1])


def _own_class(machine: Machine, function: str, arguments: Any) -> Made | None:
    """The record of a tensor of a class of its own, with the attributes that it has; None: a plain one."""
    if function != TYPED or type(arguments) is not tuple or len(arguments) != 4:
        return None
    _, kind, inner, attributes = arguments
    if type(kind) is not Opaque or kind.name in PLAIN or type(inner) is not tuple:
        return None
    made = Made(kind.name, inner)
    # Python keeps those of slots apart: the second of two.
    given = [one for one in (attributes if type(attributes) is tuple else (attributes,)) if type(one) is dict]
    machine.spend(sum(map(len, given)))
    made.state = {key: value for one in given for key, value in one.items()}
    return made


def _text(form: struct.Struct) -> Callable[[_Inert], None]:
    return lambda m: m.push(m.take(m.number(form)).decode("utf-8", "surrogatepass"))


def _bytes(form: struct.Struct) -> Callable[[_Inert], None]:
    return lambda m: m.push(m.take(m.number(form)))


_ADDED: dict[str, Callable[[_Inert], None]] = {
    "c": _Inert.name_global,
    "R": _Inert.reduce,
    "b": _Inert.build,
    "\x81": _Inert.new_object,
    "\x92": _Inert.new_object_with_keywords,
    "\x93": _Inert.stack_global,
    "\x94": _Inert.memoize,
    "\x95": _Inert.frame,
    "\x8c": _text(_U8),
    "\x8d": _text(_U64),
    "C": _bytes(_U8),
    "B": _bytes(_U32),
    "\x8e": _bytes(_U64),
    "\x8b": _Inert.long_number,
    "\x8f": lambda m: m.push([]),
    "\x90": lambda m: m.extend(m.to_mark()),
    "\x91": lambda m: m.push(m.to_mark()),
    "0": _Inert.discard,
    "1": _Inert.discard_to_mark,
    "2": _Inert.duplicate,
}
_Inert.instructions = {**INSTRUCTIONS, **{ord(code): step for code, step in _ADDED.items()}}
