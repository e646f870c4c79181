"""Find references to parameters and buffers outside a module's registry, and update them.

A load replaces parameters: they change dtype, are cut, and belong to the engine. A list of parameters in a
module would keep the old ones. So such references are found right after construction, and updated when a
parameter is replaced.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm

from zerostart.errors import BuildError
from zerostart.models.operator_log import storage_key


@dataclass(frozen=True)
class Slot:
    """A place of a tensor in a model.

    ``path`` is its Python expression, ``hidden`` says that it is inside an unregistered module. ``get`` looks
    it up again each time, so containers may be replaced by others of the same form.
    """

    path: str
    get: Callable[[], Any]
    set: Callable[[object], None]
    hidden: bool = False

    def within(self, suffix: str, get: Callable[[Any], object], assign: Callable[[Any, Any], None]) -> Slot:
        """Return a place inside the object that is here."""
        return Slot(
            self.path + suffix, lambda: get(self.get()), lambda new: assign(self.get(), new), self.hidden
        )


#: Attributes in which every module registers tensors.
_REGISTERED = frozenset(("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"))
#: Types of objects that hold no tensors.
_ATOMS: tuple[type, ...] = (type(None), int, str, bytes, float, complex, type, types.ModuleType)
_ATOMS += (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, torch.Generator)


def tensor_slot(module: nn.Module, leaf: str, path: str) -> Slot:
    """Return the place of a parameter or buffer, bypassing setters."""
    tensors: Any = module._parameters if leaf in module._parameters else module._buffers
    return Slot(path, lambda: tensors[leaf], functools.partial(tensors.__setitem__, leaf))


def find_tensor_slots(model: nn.Module) -> Iterator[Slot]:
    """Yield places with unregistered tensors, in the order of the modules."""
    # Registered modules come from ``named_modules``; skip them inside attributes.
    own = {id(module) for module in model.modules()}
    visited: dict[int, object] = {}
    for prefix, module in model.named_modules():
        # A list instead of recursion: structures may be deeper than Python's stack.
        waiting = list(_find_inside(_module_slot(module, prefix), module, _REGISTERED))
        while waiting:
            slot = waiting.pop()
            value = slot.get()
            if isinstance(value, torch.Tensor):
                yield slot
            elif isinstance(value, nn.Module):
                if id(value) not in own and _visit(value, visited):
                    waiting += _find_inside(replace(slot, hidden=True), value)
            # Immutable objects are entered each time: every place that holds one needs a new one.
            elif isinstance(value, (tuple, weakref.ref)) or _visit(value, visited):
                waiting += _find_inside(slot, value)


def _visit(value: object, visited: dict[int, object]) -> bool:
    if id(value) in visited:
        return False
    visited[id(value)] = value
    return True


def _holds_nothing(value: object) -> bool:
    # Instances of subclasses may have attributes too.
    return (type(value) in (dict, OrderedDict, list, tuple) and not value) or isinstance(value, _ATOMS)


def _module_slot(module: nn.Module, path: str) -> Slot:
    return Slot(path, lambda: module, lambda _: None)


def _find_inside(slot: Slot, value: object, but: frozenset[str] = frozenset()) -> Iterator[Slot]:
    """Yield places inside ``value``, without the attributes ``but``."""
    if isinstance(value, weakref.ref):
        if value() is not None:
            yield slot.within("()", lambda container: container(), functools.partial(_set_reference, slot))
        return
    if isinstance(value, (dict, list, tuple)):
        container: Any = value
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            if not _holds_nothing(container[key]):
                yield _item_slot(slot, key)
    if not isinstance(value, tuple):
        for leaf, attribute in list(_attributes_of(value).items()):
            if leaf not in but and not _holds_nothing(attribute):
                yield _attribute_slot(slot, leaf)


def _attributes_of(owner: object) -> dict[str, object]:
    try:
        attributes: dict[str, Any] = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}
    return attributes


def _attribute_slot(slot: Slot, leaf: str) -> Slot:
    def assign(owner: object, new: object) -> None:
        _attributes_of(owner)[leaf] = new

    return slot.within(f".{leaf}" if slot.path else leaf, lambda owner: _attributes_of(owner)[leaf], assign)


def _item_slot(slot: Slot, key: Any) -> Slot:
    def assign(container: Any, new: object) -> None:
        if isinstance(container, tuple):
            kind = type(container)
            make = getattr(kind, "_make", kind)  # a named tuple takes its parts as arguments
            slot.set(make([*container[:key], new, *container[key + 1 :]]))
        else:
            container[key] = new

    suffix = f"[{key!r}]" if isinstance(key, (str, int)) else "[...]"
    return slot.within(suffix, lambda container: container[key], assign)


def _set_reference(slot: Slot, reference: Any, new: object) -> None:
    slot.set(type(reference)(new, reference.__callback__))


@dataclass(frozen=True)
class Alias:
    """An unregistered reference to a parameter or buffer, or to its ``detached`` data."""

    slot: Slot
    name: str
    detached: bool = False

    def follow(self, tensor: torch.Tensor) -> None:
        """Put the new tensor there."""
        self.slot.set(tensor.detach() if self.detached else tensor)


@dataclass(frozen=True)
class _View:
    """A place with a view of a tensor elsewhere."""

    slot: Slot
    #: Name of the buffer here; None for an attribute.
    name: str | None
    #: Place of the tensor with all the elements.
    base: Slot
    #: Name of the buffer there; None for an attribute.
    base_name: str | None
    #: Size and ``stride`` of the view, in elements.
    size: tuple[int, ...]
    stride: tuple[int, ...]
    #: Elements from the start of the base.
    offset: int

    def of(self, base: torch.Tensor) -> torch.Tensor:
        return base.detach().as_strided(self.size, self.stride, int(base.storage_offset()) + self.offset)


@dataclass(frozen=True)
class Aliases:
    """Unregistered references to tensors, and views of buffers."""

    entries: tuple[Alias, ...]
    views: tuple[_View, ...]
    #: Tensors of the entries by name; weak references do not keep them alive.
    alive: dict[str, torch.Tensor] = field(default_factory=dict)

    @staticmethod
    def of(model: nn.Module, views: bool = True) -> Aliases:
        """Find the aliases of a model right after its construction.

        Without ``views``, the loader gives each name separate memory. Raises BuildError, with names, for
        parameters that share memory in another way.
        """
        # Reversed, so that the first of several names counts.
        named = {id(tensor): (slot, tensor) for slot, tensor in reversed([*_iter_registered(model)])}
        own = {id(p) for p in model.parameters()}
        memory = {_memory_key(t): slot.path for slot, t in named.values() if id(t) in own and _memory_key(t)}
        if views:
            _check_parameters(named.values(), memory)
        aliases: list[Alias] = []
        unnamed: list[tuple[Slot, str | None, torch.Tensor]] = []
        for slot in find_tensor_slots(model):
            tensor: torch.Tensor = slot.get()
            if id(tensor) in named:
                aliases.append(Alias(slot, named[id(tensor)][0].path))
            elif slot.hidden:
                continue
            elif (name := memory.get(_memory_key(tensor))) is None:
                unnamed.append((slot, None, tensor))
            elif slot.path in _find_spectral_weights(model):
                aliases.append(Alias(slot, name, detached=True))
            else:
                raise BuildError(
                    f"{slot.path} is a view of the parameter {name}, which is sharded or moved, so the "
                    "view would no longer follow it. Refer to the parameter itself instead, or take the "
                    "view in forward"
                )
        buffers = [(slot, slot.path, t) for slot, t in named.values() if id(t) not in own]
        looking = tuple(_find_views([*reversed(buffers), *unnamed])) if views else ()
        alive = {alias.name: _get_tensor(model, alias.name) for alias in aliases}
        return Aliases(tuple(aliases), looking, alive)

    def without_values(self) -> set[int]:
        """Return ``id`` of unregistered tensors that follow others."""
        unregistered = [alias.slot for alias in self.entries] + [v.slot for v in self.views if v.name is None]
        return {id(slot.get()) for slot in unregistered}

    def follow(self, model: nn.Module) -> None:
        """Update each place with the present tensor of its name."""
        now = {name: _get_tensor(model, name) for name in self.alive}
        for alias in self.entries:
            alias.follow(now[alias.name])
        self.alive.update(now)

    def join(self, loaded: Collection[str]) -> None:
        """Restore shared memory once all tensors have values.

        ``loaded`` lists the buffers from the checkpoint in the order in which torch copies them. If two fill
        the same elements, the later one counts.
        """
        order = {name: at for at, name in enumerate(loaded)}
        # Buffers that the checkpoint lacks come first (-1).
        for view in sorted(self.views, key=lambda view: order.get(view.name or "", -1)):
            part, own = view.of(view.base.get()), view.slot.get()
            at = order.get(view.name or "", -1)
            if view.name is not None and (view.base_name is None or at > order.get(view.base_name, -1)):
                part.copy_(own)
            # Keep a buffer on the device and in the dtype that the load gave it.
            if view.name is None or (part.device == own.device and (at < 0 or part.dtype == own.dtype)):
                view.slot.set(part)


def _iter_registered(model: nn.Module) -> Iterator[tuple[Slot, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for held in (module._parameters, module._buffers):
            for leaf, tensor in held.items():
                if tensor is not None:
                    yield tensor_slot(module, leaf, f"{prefix}.{leaf}" if prefix else leaf), tensor


def _memory_key(tensor: torch.Tensor) -> int | None:
    """Return the identity of shareable memory, or None."""
    if (
        tensor.layout != torch.strided
        or not tensor.numel()
        or type(tensor) not in (torch.Tensor, nn.Parameter)
    ):
        return None
    return storage_key(tensor)


def _get_tensor(model: nn.Module, name: str) -> torch.Tensor:
    owner, leaf = find_owner(model, name)
    tensor = owner._parameters[leaf] if leaf in owner._parameters else owner._buffers[leaf]
    assert tensor is not None, "a tensor that was registered stays so"
    return tensor


def _check_parameters(named: Iterable[tuple[Slot, torch.Tensor]], memory: Mapping[int | None, str]) -> None:
    """Refuse tensors that are views of another parameter."""
    for slot, tensor in named:
        owner = memory.get(_memory_key(tensor), slot.path)
        if owner != slot.path:
            raise BuildError(
                f"{slot.path} and the parameter {owner} share memory without being the same tensor, "
                "which a sharded model cannot do; give both modules the same parameter, or let each "
                "have its own memory"
            )


def _find_spectral_weights(model: nn.Module) -> set[str]:
    return {
        f"{prefix}.{hook.name}".lstrip(".")
        for prefix, module in model.named_modules()
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, SpectralNorm)
    }


def _find_views(places: list[tuple[Slot, str | None, torch.Tensor]]) -> Iterator[_View]:
    """Yield views of buffers and attributes. Raises BuildError for partial overlaps."""
    by_memory: dict[int, list[tuple[Slot, str | None, torch.Tensor]]] = {}
    for entry in places:
        memory = _memory_key(entry[2])
        if memory is not None:
            by_memory.setdefault(memory, []).append(entry)
    for group in by_memory.values():
        if len(group) > 1 and any(name for _, name, _ in group):
            yield from _find_views_in(group)


def _find_views_in(group: list[tuple[Slot, str | None, torch.Tensor]]) -> Iterator[_View]:
    whole: list[tuple[Slot, str | None, torch.Tensor]] = []
    # Largest first; buffers before equal attributes, since a load fills buffers.
    for slot, name, tensor in sorted(group, key=lambda e: (-_byte_range(e[2])[2], not e[2].is_contiguous())):
        low, high, _ = _byte_range(tensor)
        base = next((e for e in whole if _byte_range(e[2])[0] <= low and high <= _byte_range(e[2])[1]), None)
        if base is not None and base[2].is_contiguous() and base[2].dtype == tensor.dtype:
            offset = int(tensor.storage_offset()) - int(base[2].storage_offset())
            size, stride = tuple(tensor.shape), tensor.stride()
            yield _View(slot, name, base[0], base[1], size, stride, offset)
            continue
        clash = next((e for e in whole if low < _byte_range(e[2])[1] and _byte_range(e[2])[0] < high), None)
        if clash is not None and (name or clash[1]):
            raise BuildError(
                f"{slot.path} and {clash[0].path} share part of their memory; make one a view of the other, "
                "or let each have its own memory"
            )
        whole.append((slot, name, tensor))


def _byte_range(tensor: torch.Tensor) -> tuple[int, int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    low = int(tensor.storage_offset()) * tensor.itemsize
    high = low + (last + 1) * tensor.itemsize
    return low, high, high - low


def find_owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module with the tensor ``name``, and its name there."""
    path, _, leaf = name.rpartition(".")
    return (model.get_submodule(path) if path else model), leaf


def replace_tensor(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Replace the parameter or buffer ``name``, bypassing setters.

    Raises KeyError if there is none.
    """
    owner, leaf = find_owner(model, name)
    if leaf in owner._parameters:
        owner._parameters[leaf] = tensor  # type: ignore[assignment]  # a Parameter, by the caller's care
    elif leaf in owner._buffers:
        owner._buffers[leaf] = tensor
    else:
        raise KeyError(name)


def replace_all(
    model: nn.Module,
    named: Iterable[tuple[str, torch.Tensor]],
    make: Callable[[str, torch.Tensor], torch.Tensor],
) -> None:
    """Replace tensors, under all their names, by results of ``make``."""
    replacements: dict[int, torch.Tensor] = {}
    for name, tensor in list(named):
        if id(tensor) not in replacements:
            replacements[id(tensor)] = make(name, tensor)
        replace_tensor(model, name, replacements[id(tensor)])


def state_names(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield ``(name, tensor, is a buffer)`` in the order of the state dict."""
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                yield start + leaf, parameter, False
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf not in module._non_persistent_buffers_set:
                yield start + leaf, buffer, True


def recast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a meta tensor in ``dtype``; parameters keep their attributes."""
    cast = torch.empty(tensor.shape, dtype=dtype, device="meta")
    if not isinstance(tensor, nn.Parameter):
        return cast
    parameter = nn.Parameter(cast, requires_grad=tensor.requires_grad and dtype.is_floating_point)
    parameter.__dict__.update(tensor.__dict__)
    return parameter
