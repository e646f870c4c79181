"""Replace names of other libraries inside a block, or while an object lives."""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from torch import nn

from zerostart.errors import UnsupportedVersionError
from zerostart.upstream.guard import Function, Use, find_misfits, resolve

# Reentrant: a garbage collection inside a locked section may run a finalizer, which closes patches here.
_lock = threading.RLock()
_ABSENT = object()


class _Layer:
    def __init__(self, owner: object, before: object) -> None:
        self.owner = getattr(owner, "__name__", type(owner).__name__)
        self.before = before


#: Replacements of each (id of the owner, name), the last one on top.
_layers: dict[tuple[int, str], list[_Layer]] = {}


def active() -> list[str]:
    """List the names of other libraries that are replaced in this process now."""
    with _lock:
        return [f"{layers[0].owner}.{name}" for (_, name), layers in _layers.items()]


@contextlib.contextmanager
def patch(owner: object, name: str, new: object) -> Iterator[None]:
    """Set ``owner.name`` to ``new`` inside the block; keep later replacements."""
    # ``vars``, since deleting ours is enough to restore an inherited attribute.
    layer = _Layer(owner, vars(owner).get(name, _ABSENT))
    with _lock:
        setattr(owner, name, new)
        layers = _layers.setdefault((id(owner), name), [])
        layers.append(layer)
    try:
        yield
    finally:
        with _lock:
            at = layers.index(layer)
            del layers[at]
            if at < len(layers):
                if layers[at].before is new:
                    layers[at].before = layer.before
            elif vars(owner).get(name, _ABSENT) is new:
                if layer.before is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, layer.before)
            if not layers:
                _layers.pop((id(owner), name), None)


@contextlib.contextmanager
def patch_everywhere(name: str, original: object, new: object) -> Iterator[None]:
    """Replace ``name`` in every module that has ``original`` there, also in new ones."""
    with ExitStack() as stack:
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(name) is original:
                stack.enter_context(patch(module, name, new))
        try:
            yield
        finally:
            for module in list(sys.modules.values()):
                if getattr(module, "__dict__", {}).get(name) is new:
                    setattr(module, name, original)


def wrap(stack: ExitStack, owner: Any, name: str, replacement: Function, everywhere: bool = False) -> None:
    """Send calls of ``owner.name`` to ``replacement(original, ...)`` until ``stack`` ends.

    With ``everywhere``, the function is also replaced in modules that imported it.
    """
    stored = inspect.getattr_static(owner, name)
    original = getattr(stored, "__func__", stored)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    new: Any = type(stored)(call) if isinstance(stored, classmethod | staticmethod) else call
    stack.enter_context(patch_everywhere(name, stored, new) if everywhere else patch(owner, name, new))


class Ticket:
    """Object that keeps replacements active while it, or its copy, is referenced."""

    def __deepcopy__(self, memo: object) -> Ticket:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        # Unpickle as None: other processes make their own replacements.
        return type(None), ()


class RefCountedPatches:
    """Replacements that ``enter(stack)`` makes, active while one of their holders lives."""

    def __init__(self, enter: Callable[[ExitStack], None]) -> None:
        self._enter = enter
        self._stack: ExitStack | None = None
        self._count = 0
        self._ticket: weakref.ref[Ticket] | None = None
        #: Living objects that called ``hold``.
        self.holders: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def is_open(self) -> bool:
        """True if the replacements are active."""
        return self._stack is not None

    def open(self) -> None:
        """Activate the replacements; each call needs its own ``close``."""
        with _lock:
            self._count += 1  # Count first: another holder may end at any time.
            if self._stack is not None:
                return
            try:
                with ExitStack() as stack:
                    self._enter(stack)
                    self._stack = stack.pop_all()
            except BaseException:
                self._count -= 1
                raise

    def close(self) -> None:
        """Undo one ``open``."""
        with _lock:
            self._count -= 1
            if self._count == 0 and self._stack is not None:
                stack, self._stack = self._stack, None
                stack.close()

    def hold(self, holder: object) -> None:
        """Keep the replacements active while ``holder`` lives."""
        self.open()
        self.holders.add(holder)
        weakref.finalize(holder, self.close).atexit = False

    def ticket(self) -> Ticket:
        """Return an object that keeps the replacements active while it lives."""
        with _lock:
            ticket = None if self._ticket is None else self._ticket()
            if ticket is None:
                ticket = Ticket()
                self.hold(ticket)
                self._ticket = weakref.ref(ticket)
            return ticket


def check_compatible(stack: ExitStack, patches: RefCountedPatches, uses: Sequence[Use], remedy: str) -> bool:
    """Return True if the libraries match ``uses``; otherwise let the first use refuse held models."""
    wrong = find_misfits(uses)
    if wrong:
        _refuse(stack, patches, uses[0], f"{wrong}. {remedy}")
    return not wrong


def _refuse(stack: ExitStack, patches: RefCountedPatches, use: Use, text: str) -> None:
    try:
        owner = resolve(use.owner)
    except (ImportError, AttributeError):
        return
    is_module = inspect.ismodule(owner)

    def refuse(original: Function, *args: Any, **kwargs: Any) -> object:
        if _uses_held_model((*args, *kwargs.values()), patches, is_method=not is_module):
            raise UnsupportedVersionError(text)
        return original(*args, **kwargs)

    for name in use.functions:
        if callable(getattr(owner, name, None)):
            wrap(stack, owner, name, refuse, everywhere=is_module)


def _uses_held_model(arguments: Iterable[object], patches: RefCountedPatches, is_method: bool) -> bool:
    models = [model for argument in arguments for model in _find_models(argument)]
    ours = {
        id(part) for holder in patches.holders if isinstance(holder, nn.Module) for part in holder.modules()
    }
    if not models:
        return not is_method
    return any(id(part) in ours for model in models for part in model.modules())


def _find_models(argument: object) -> Iterator[nn.Module]:
    if isinstance(argument, nn.Module):
        yield argument
    else:
        own = getattr(argument, "__dict__", {}).values()
        candidates = (getattr(argument, "model", None), *(getattr(argument, "_models", None) or ()), *own)
        yield from (model for model in candidates if isinstance(model, nn.Module))


def call_on_import(name: str, then: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Call ``then(module)``, now or after the import of ``name``; return a cancel function."""
    if name in sys.modules:
        then(sys.modules[name])
        return lambda: None
    finder = _Finder(name, then)
    sys.meta_path.insert(0, finder)
    return finder.remove


def enter_on_import(stack: ExitStack, name: str, enter: Callable[[ExitStack, ModuleType], None]) -> None:
    """Call ``enter(later, module)`` after the import of ``name``; ``stack`` undoes both."""
    later = stack.enter_context(ExitStack())
    stack.callback(call_on_import(name, functools.partial(enter, later)))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        self.remove()  # Before the search below, which would call this finder again.
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._then)
        return spec

    def remove(self) -> None:
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, then: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        # importlib.resources and reload need the original loader.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._then(module)
