"""Shrink classes whose widths are constants in the code of their constructor."""

import functools
import types
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from torch import nn


def lazy_class(path: str, constants: Mapping[int, int] | None = None) -> Callable[[], type[nn.Module]]:
    """Return a function that imports ``module:name``, shrunk by other ``constants``."""

    def import_class() -> type[nn.Module]:
        module, _, name = path.partition(":")
        kind = getattr(import_module(f"diffsynth.models.{module}"), name)
        return shrink(kind, constants) if constants else kind

    return functools.cache(import_class)


def shrink(kind: type[nn.Module], constants: Mapping[int, int]) -> type[nn.Module]:
    """Return a subclass whose constructor has other numbers in its code."""
    function = kind.__init__
    consts = tuple(_replace(c, constants) for c in function.__code__.co_consts)
    code = _replace_in_code(function.__code__.replace(co_consts=consts), constants)
    new = types.FunctionType(
        code, function.__globals__, "__init__", function.__defaults__, function.__closure__
    )
    new.__kwdefaults__ = function.__kwdefaults__
    # A subclass, because ``super().__init__()`` in the code refers to the original class.
    return type(kind.__name__, (kind,), {"__init__": new, "__module__": kind.__module__})


def _replace(value: Any, constants: Mapping[int, int]) -> Any:
    if isinstance(value, tuple):
        return tuple(_replace(v, constants) for v in value)
    return constants.get(value, value) if type(value) is int else value


def _replace_in_code(code: types.CodeType, constants: Mapping[int, int]) -> types.CodeType:
    """Replace the constants of nested code too, such as list comprehensions."""
    inner = tuple(
        _replace_in_code(c.replace(co_consts=tuple(_replace(x, constants) for x in c.co_consts)), constants)
        if isinstance(c, types.CodeType)
        else c
        for c in code.co_consts
    )
    return code.replace(co_consts=inner)
