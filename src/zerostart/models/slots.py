"""Places where a model keeps tensors that no state dict knows: attributes, and whatever these hold.

Lists, tuples, dictionaries and their keys, sets, plain objects, closures, partial functions, bound methods
and weak references are looked into, and modules that a module holds without registering them. A place can
be given another tensor, also within what cannot be changed: that is then made anew where it is held.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Slot:
    """A place; ``path`` is how one would write it, ``hidden`` whether it is inside an unregistered module.

    It is looked up anew each time, so that a container may be replaced by one of the same form.
    """

    path: str
    get: Callable[[], Any]
    set: Callable[[object], None]
    hidden: bool = False

    def within(self, suffix: str, get: Callable[[], object], put: Callable[[object], None]) -> Slot:
        """A place inside what lies here."""
        return Slot(self.path + suffix, get, put, self.hidden)


#: What every module has of its own and registers tensors in.
_REGISTERED = frozenset(("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"))
#: What holds nothing.
_ATOMS: tuple[type, ...] = (str, bytes, int, float, complex, type(None), type, types.ModuleType)
_ATOMS += (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, torch.Generator)
_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)


def registered(module: nn.Module, leaf: str, path: str) -> Slot:
    """The place of a parameter or buffer, past the setters."""
    held: Any = module._parameters if leaf in module._parameters else module._buffers
    return Slot(path, lambda: held[leaf], functools.partial(held.__setitem__, leaf))


def tensor_slots(model: nn.Module) -> Iterator[Slot]:
    """Every place with a tensor that is not registered, in the order of the modules."""
    # Modules of the model are walked by ``named_modules``: met inside an attribute they are passed over.
    own = {id(module) for module in model.modules()}
    seen: dict[int, object] = {}
    for prefix, module in model.named_modules():
        # A place that is never set: it gives the path only.
        start = Slot(prefix, lambda: None, lambda _: None)
        # By a list and not by recursion: structures may be deeper than Python's stack.
        waiting = list(_attributes(module, start, _REGISTERED))
        while waiting:
            slot = waiting.pop()
            value = slot.get()
            if isinstance(value, torch.Tensor):
                yield slot
            elif isinstance(value, nn.Module):
                if id(value) not in own and _first(value, seen):
                    waiting += _attributes(value, Slot(slot.path, slot.get, slot.set, hidden=True))
            # What cannot be changed in place is entered each time it is met: every place that holds it has to
            # be given a new one.
            elif isinstance(value, (tuple, frozenset, weakref.ref, *_METHODS)) or _first(value, seen):
                waiting += _inside(slot, value)


def _first(value: object, seen: dict[int, object]) -> bool:
    """Whether ``value`` is met for the first time; it is kept, for its ``id`` to stay its own."""
    if id(value) in seen:
        return False
    seen[id(value)] = value
    return True


def _empty(value: object) -> bool:
    # Instances of other classes may have attributes besides.
    return isinstance(value, _ATOMS) or (type(value) in (dict, OrderedDict, list, tuple, set) and not value)


def _inside(slot: Slot, value: object) -> list[Slot]:
    """The places in what lies in ``slot``, but for those that hold nothing."""
    if isinstance(value, dict):
        return [*_entries(slot, value), *_state(slot, value)]
    if isinstance(value, (list, deque)):
        return [_item(slot, i) for i, held in enumerate(value) if not _empty(held)] + [*_state(slot, value)]
    if isinstance(value, tuple):
        return [_part(slot, i) for i, held in enumerate(value) if not _empty(held)]
    if isinstance(value, (set, frozenset)):
        return [_element(slot, held) for held in value if not _empty(held)]
    if isinstance(value, weakref.ref):
        return [] if value() is None else [_referent(slot)]
    if isinstance(value, _METHODS):
        return [] if _empty(value.__self__) else [_owner(slot)]
    if isinstance(value, functools.partial):
        return _arguments(slot, value)
    if isinstance(value, types.FunctionType):
        return [*_captured(slot, value), *_state(slot, value)]
    return list(_state(slot, value))


def _attributes(module: nn.Module, slot: Slot, but: frozenset[str] = frozenset()) -> Iterator[Slot]:
    """The attributes of a module; of one that is registered nowhere, what it registers as well."""
    for leaf, held in list(vars(module).items()):
        if leaf not in but and not _empty(held):
            path = f".{leaf}" if slot.path else leaf
            yield slot.within(
                path, functools.partial(_look, module, leaf), functools.partial(_put, module, leaf)
            )


def _dictionary(owner: object) -> dict[str, object]:
    """What an object has as its own attributes, past what its class makes of the question."""
    try:
        held: dict[str, Any] = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}
    return held


def _look(owner: object, leaf: str) -> object:
    return _dictionary(owner)[leaf]


def _put(owner: object, leaf: str, value: object) -> None:
    _dictionary(owner)[leaf] = value


def _state(slot: Slot, value: object) -> Iterator[Slot]:
    """The attributes of an object, those in ``__slots__`` included."""
    for leaf, held in list(_dictionary(value).items()):
        if not _empty(held):
            yield _attribute(slot, leaf)
    # Each class of the MRO has slots of its own; ``vars`` alone does not have their values.
    for kind in type(value).__mro__:
        named = vars(kind).get("__slots__", ())
        for leaf in (named,) if isinstance(named, str) else tuple(named):
            member = vars(kind).get(leaf)
            if isinstance(member, types.MemberDescriptorType) and not _empty(getattr(value, leaf, None)):
                yield _member(slot, member)


def _attribute(slot: Slot, leaf: str) -> Slot:
    return slot.within(
        f".{leaf}", lambda: _dictionary(slot.get())[leaf], lambda new: _put(slot.get(), leaf, new)
    )


def _member(slot: Slot, member: types.MemberDescriptorType) -> Slot:
    return slot.within(
        f".{member.__name__}",
        lambda: member.__get__(slot.get()),
        lambda new: member.__set__(slot.get(), new),
    )


def _entries(slot: Slot, value: dict[object, object]) -> Iterator[Slot]:
    for key, held in list(value.items()):
        if not _empty(held):
            yield slot.within(f"[{key!r}]" if isinstance(key, (str, int)) else "[...]", *_entry(slot, key))
        if not _empty(key):
            yield _key(slot, key)


def _entry(slot: Slot, key: object) -> tuple[Callable[[], Any], Callable[[object], None]]:
    return (lambda: slot.get()[key]), (lambda new: slot.get().__setitem__(key, new))


def _item(slot: Slot, number: int) -> Slot:
    return slot.within(f"[{number}]", *_entry(slot, number))


def _key(slot: Slot, key: object) -> Slot:
    """The key of an entry; the order of the entries stays."""
    now = [key]

    def put(new: object) -> None:
        held = slot.get()
        # Emptied and filled again: a key replaced in place would go to the end.
        entries = [(new if k is now[0] else k, v) for k, v in held.items()]
        held.clear()
        held.update(entries)
        now[0] = new

    return slot.within(".keys()", lambda: now[0], put)


def _part(slot: Slot, number: int) -> Slot:
    def put(new: object) -> None:
        old = slot.get()
        parts = [*old[:number], new, *old[number + 1 :]]
        made = getattr(type(old), "_make", type(old))  # a named tuple takes its parts one by one
        slot.set(made(parts))

    return slot.within(f"[{number}]", lambda: slot.get()[number], put)


def _element(slot: Slot, element: object) -> Slot:
    now = [element]

    def put(new: object) -> None:
        held = slot.get()
        if isinstance(held, frozenset):
            slot.set(type(held)(new if e is now[0] else e for e in held))
        else:
            # By identity and hash of the old element, which ``now`` remembers: the set has no other name for
            # the place.
            held.discard(now[0])
            held.add(new)
        now[0] = new

    return slot.within("{...}", lambda: now[0], put)


def _referent(slot: Slot) -> Slot:
    def put(new: object) -> None:
        old = slot.get()
        # Of a ``WeakValueDictionary``, which finds the entry by the key when the value goes.
        if isinstance(old, weakref.KeyedRef):
            slot.set(weakref.KeyedRef(new, old.__callback__, old.key))
        else:
            slot.set(type(old)(new, old.__callback__))

    return slot.within("()", lambda: slot.get()(), put)


def _owner(slot: Slot) -> Slot:
    """What a method is bound to."""

    def put(new: object) -> None:
        # A bound method cannot be rebound: the new object is asked for its own of that name.
        slot.set(getattr(new, slot.get().__name__))

    return slot.within(".__self__", lambda: slot.get().__self__, put)


def _arguments(slot: Slot, value: functools.partial[object]) -> list[Slot]:
    """What a partial function holds; it is changed in place, since others may hold it too."""

    def held() -> list[Any]:
        return [value.func, value.args, value.keywords, value.__dict__]

    def put(number: int, new: object) -> None:
        state = held()
        state[number] = new
        changed: Any = value
        changed.__setstate__(tuple(state))

    def place(number: int, suffix: str) -> Slot:
        return slot.within(suffix, lambda: held()[number], functools.partial(put, number))

    named = enumerate((".func", ".args", ".keywords"))
    return [place(number, suffix) for number, suffix in named if not _empty(held()[number])]


def _captured(slot: Slot, function: types.FunctionType) -> Iterator[Slot]:
    """What a function closes over, and its defaults."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            empty = _empty(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
        if not empty:
            yield _own(slot, f"<{name}>", cell, "cell_contents")
    for leaf in ("__defaults__", "__kwdefaults__"):
        if not _empty(getattr(function, leaf)):
            yield _own(slot, f".{leaf}", function, leaf)


def _own(slot: Slot, suffix: str, owner: object, leaf: str) -> Slot:
    return slot.within(suffix, lambda: getattr(owner, leaf), functools.partial(setattr, owner, leaf))
