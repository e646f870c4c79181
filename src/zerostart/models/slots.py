"""Places where a model keeps tensors that no state dict knows: attributes, and what these hold.

Lists, tuples, dictionaries, plain objects, weak references and unregistered modules are looked into. A place
can be given another tensor, also in a tuple or a weak reference, which is then made anew where it is held.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict
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
            elif isinstance(value, (tuple, weakref.ref)) or _first(value, seen):
                waiting += _inside(slot, value)


def _first(value: object, seen: dict[int, object]) -> bool:
    """Whether ``value`` is met for the first time; it is kept, for its ``id`` to stay its own."""
    if id(value) in seen:
        return False
    seen[id(value)] = value
    return True


def _empty(value: object) -> bool:
    # Instances of other classes may have attributes besides.
    return isinstance(value, _ATOMS) or (type(value) in (dict, OrderedDict, list, tuple) and not value)


def _inside(slot: Slot, value: object) -> list[Slot]:
    """The places in what lies in ``slot``, but for those that hold nothing."""
    if isinstance(value, dict):
        return [*_entries(slot, value), *_state(slot, value)]
    if isinstance(value, list):
        return [_item(slot, i) for i, held in enumerate(value) if not _empty(held)] + [*_state(slot, value)]
    if isinstance(value, tuple):
        return [_part(slot, i) for i, held in enumerate(value) if not _empty(held)]
    if isinstance(value, weakref.ref):
        return [] if value() is None else [_referent(slot)]
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
    """The attributes of an object."""
    for leaf, held in list(_dictionary(value).items()):
        if not _empty(held):
            yield _attribute(slot, leaf)


def _attribute(slot: Slot, leaf: str) -> Slot:
    return slot.within(
        f".{leaf}", lambda: _dictionary(slot.get())[leaf], lambda new: _put(slot.get(), leaf, new)
    )


def _entries(slot: Slot, value: dict[object, object]) -> Iterator[Slot]:
    for key, held in list(value.items()):
        if not _empty(held):
            yield slot.within(f"[{key!r}]" if isinstance(key, (str, int)) else "[...]", *_entry(slot, key))


def _entry(slot: Slot, key: object) -> tuple[Callable[[], Any], Callable[[object], None]]:
    return (lambda: slot.get()[key]), (lambda new: slot.get().__setitem__(key, new))


def _item(slot: Slot, number: int) -> Slot:
    return slot.within(f"[{number}]", *_entry(slot, number))


def _part(slot: Slot, number: int) -> Slot:
    def put(new: object) -> None:
        old = slot.get()
        parts = [*old[:number], new, *old[number + 1 :]]
        made = getattr(type(old), "_make", type(old))  # a named tuple takes its parts one by one
        slot.set(made(parts))

    return slot.within(f"[{number}]", lambda: slot.get()[number], put)


def _referent(slot: Slot) -> Slot:
    def put(new: object) -> None:
        slot.set(type(slot.get())(new, slot.get().__callback__))

    return slot.within("()", lambda: slot.get()(), put)
