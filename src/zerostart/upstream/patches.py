"""Putting something in the place of a name of another library, for a time, with a list of what is in place.

Nothing of another library is replaced but by :func:`replaced`, which ends with its block, or by
:class:`RefCountedPatches`, which end with the last of what asked for them. :func:`active` tells what is in
place now.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

from zerostart.errors import UnsupportedVersionError
from zerostart.upstream.registry import PatchPoint, Touched, misfit
from zerostart.upstream.shapes import Function, resolve

# Reentrant: a garbage collection inside a locked section may run a finalizer, which closes patches here.
_lock = threading.RLock()
_active: list[PatchPoint] = []
_ABSENT = object()


class _Layer:
    """Something of ours in the place of a name, and what was there ``before``."""

    def __init__(self, before: object) -> None:
        self.before = before


#: By the identity of an owner, which lives as long, and a name: what is in its place, the last one on top.
_layers: dict[tuple[int, str], list[_Layer]] = {}


def active() -> tuple[PatchPoint, ...]:
    """What of other libraries is replaced in this process at this moment, each point once."""
    with _lock:
        return tuple(dict.fromkeys(_active))


@contextlib.contextmanager
def replaced(point: PatchPoint, owner: object, name: str, new: object) -> Iterator[None]:
    """Inside, ``owner.name`` is ``new``: of a module, a class, or a single object.

    What somebody else has put over ours by the end stays. Of several of ours the first may end first: what it
    has replaced is there again when the last one ends.
    """
    # Only what the owner itself has: what it inherits is found again when ours is deleted.
    layer = _Layer(vars(owner).get(name, _ABSENT))
    with _lock:
        setattr(owner, name, new)
        _active.append(point)
        layers = _layers.setdefault((id(owner), name), [])
        # The stack of one name; its order is that in which we came, not that in which we go.
        layers.append(layer)
    try:
        yield
    finally:
        with _lock:
            _active.remove(point)
            at = layers.index(layer)
            del layers[at]
            # Not the topmost of ours: the one above it goes back to what was below this one. The topmost:
            # taken out, unless somebody else has put something over it.
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
def replaced_wherever_imported(point: PatchPoint, name: str, original: object, new: object) -> Iterator[None]:
    """Inside, ``new`` is what every module has under ``name`` that had ``original`` there.

    A module that imports it meanwhile gets ``new``, which goes from there at the end, too.
    """
    with ExitStack() as stack:
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(name) is original:
                stack.enter_context(replaced(point, module, name, new))
        try:
            yield
        finally:
            # Also in modules that were imported meanwhile, which no replacement above knows of.
            for module in list(sys.modules.values()):
                if getattr(module, "__dict__", {}).get(name) is new:
                    setattr(module, name, original)


def note(point: PatchPoint, target: object) -> None:
    """Have ``point`` listed for as long as ``target``, an object that is changed for good, lives."""
    with _lock:
        _active.append(point)
    # At exit the interpreter takes all down anyway, and half of what would be called is gone.
    weakref.finalize(target, _forget, point).atexit = False


def _forget(point: PatchPoint) -> None:
    with _lock:
        _active.remove(point)


class Ticket:
    """Keeps replacements in place while it is referred to; copies refer to the same one, pickles to none."""

    def __deepcopy__(self, memo: object) -> Ticket:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        # A pickle of a mark is loaded where nothing is replaced: it is to hold nothing there.
        return type(None), ()


class RefCountedPatches:
    """Replacements that are in place as long as one of those that asked for them is there.

    ``enter(stack)`` puts them in place (:func:`replaced`) on the stack that ends them.
    """

    def __init__(self, enter: Callable[[ExitStack], None]) -> None:
        self._enter_on = enter
        self._stack: ExitStack | None = None
        self._count = 0
        self._ticket: weakref.ref[Ticket] | None = None
        #: What has asked for them by ``hold``, and lives.
        self.holders: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def is_open(self) -> bool:
        """Whether they are in place."""
        return self._stack is not None

    def open(self) -> None:
        """Put them in place, or keep them there, until ``close`` is called as often."""
        with _lock:
            self._count += 1  # First: the end of another holder may be noticed at any time.
            if self._stack is not None:
                return
            try:
                with ExitStack() as stack:
                    self._enter_on(stack)
                    # Only what was entered in full is kept: where one replacement fails, those before it are
                    # undone.
                    self._stack = stack.pop_all()
            except BaseException:
                self._count -= 1
                raise

    def close(self) -> None:
        """Undo one ``open``."""
        with _lock:
            self._count -= 1
            if self._count == 0 and self._stack is not None:
                # Closed for others first: what is undone may ask ``is_open``.
                stack, self._stack = self._stack, None
                stack.close()

    def hold(self, holder: object) -> None:
        """Keep them in place while ``holder`` lives."""
        self.open()
        self.holders.add(holder)
        weakref.finalize(holder, self.close).atexit = False

    def ticket(self) -> Ticket:
        """What keeps them in place while something refers to it.

        Such as a mark, which goes from one parameter to another with the attributes of the first.
        """
        with _lock:
            found = None if self._ticket is None else self._ticket()
            if found is None:
                found = Ticket()
                self.hold(found)
                self._ticket = weakref.ref(found)
            return found


def fits(
    stack: ExitStack,
    patches: RefCountedPatches,
    points: Sequence[Touched],
    remedy: str,
    calls: Iterable[PatchPoint] | None = None,
) -> bool:
    """Whether the installed libraries fit ``points``.

    A load puts replacements in place for calls that may come later, or never. So what does not fit is an
    error when it is called, not when it is put.

    Where they do not, ``calls`` (the patches among the points) are refused until ``stack`` ends, for models
    that ``patches`` is open for: UnsupportedVersionError, with the ``remedy``. Other models' are let through.
    """
    wrong = misfit(points)
    if not wrong:
        return True
    for point in calls if calls is not None else points:
        if isinstance(point, PatchPoint):
            _refuse(stack, patches, point, f"{wrong}. {remedy}")
    return False


def _refuse(stack: ExitStack, patches: RefCountedPatches, point: PatchPoint, text: str) -> None:
    try:
        owner = resolve(point.owner)
    except (ImportError, AttributeError):
        return  # and nobody calls it
    for name in point.names:
        original = inspect.getattr_static(owner, name, None)
        inner = getattr(original, "__func__", original)
        if not callable(inner):
            continue
        new: object = _refusing(inner, patches, text, of_object=not inspect.ismodule(owner))
        if inspect.ismodule(owner):
            stack.enter_context(replaced_wherever_imported(point, name, original, new))
        else:
            # What a class has is wrapped again in its kind, or the call would get one argument too many.
            bound = isinstance(original, classmethod | staticmethod)
            stack.enter_context(replaced(point, owner, name, type(original)(new) if bound else new))


def _refusing(original: Function, patches: RefCountedPatches, text: str, of_object: bool) -> Function:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> object:
        if _concerns((*args, *kwargs.values()), patches, of_object):
            raise UnsupportedVersionError(text)
        return original(*args, **kwargs)

    return call


def _concerns(arguments: Iterable[object], patches: RefCountedPatches, of_object: bool) -> bool:
    """Whether a model of a call is one that ``patches`` is open for, or part of one.

    Where no model is seen, a function may be about one, by a path; a method, of a tokenizer say, is not.
    """
    models = [model for argument in arguments for model in _models(argument)]
    ours = {
        id(part) for holder in patches.holders if isinstance(holder, nn.Module) for part in holder.modules()
    }
    if not models:
        return not of_object
    return any(id(part) in ours for model in models for part in model.modules())


def _models(argument: object) -> Iterator[nn.Module]:
    """The model that an argument of a call is, or those that a trainer, an accelerator or a pipeline has."""
    if isinstance(argument, nn.Module):
        yield argument
    else:
        own = getattr(argument, "__dict__", {}).values()
        # A Trainer has ``model``, an Accelerator ``_models``, a pipeline each part as an attribute.
        candidates = (getattr(argument, "model", None), *(getattr(argument, "_models", None) or ()), *own)
        yield from (model for model in candidates if isinstance(model, nn.Module))
