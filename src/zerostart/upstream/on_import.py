"""Doing something to a module of another library as soon as it is imported, without importing it for that."""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import Any


def when_imported(name: str, then: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Call ``then`` with the module ``name``: now, or once its import is done.

    What is returned gives the waiting up, if it still goes on.
    """
    if name in sys.modules:
        then(sys.modules[name])
        return _nothing
    finder = _Finder(name, then)
    sys.meta_path.insert(0, finder)
    return finder.leave


def enter_when_imported(stack: ExitStack, name: str, enter: Callable[[ExitStack, ModuleType], None]) -> None:
    """Call ``enter(later, module)`` as ``when_imported``; ``later`` and the waiting end with ``stack``."""
    later = stack.enter_context(ExitStack())
    stack.callback(when_imported(name, functools.partial(enter, later)))


def _nothing() -> None:
    pass


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module by the other finders, for its loader to be followed; then leaves."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        self.leave()  # First: the search that follows would come here again.
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._then)
        return spec

    def leave(self) -> None:
        """Look no further."""
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)


class _Loader(importlib.abc.Loader):
    """A loader that is followed by a call."""

    def __init__(self, loader: Any, then: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        # The module shows its own loader again, which importlib.resources and reload ask.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._then(module)
