"""Classes whose widths are constants in their code, with other constants: what runs is their own code."""

import functools
import types
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from torch import nn


def of(path: str, constants: Mapping[int, int] | None = None) -> Callable[[], type[nn.Module]]:
    """The class at ``module:name``, with other constants in its constructor."""

    def found() -> type[nn.Module]:
        module, _, name = path.partition(":")
        kind = getattr(import_module(f"diffsynth.models.{module}"), name)
        return shrunk(kind, constants) if constants else kind

    return functools.cache(found)


def shrunk(kind: type[nn.Module], constants: Mapping[int, int]) -> type[nn.Module]:
    """A subclass whose constructor has other numbers in its code."""
    function = kind.__init__
    consts = tuple(_other(c, constants) for c in function.__code__.co_consts)
    code = _recoded(function.__code__.replace(co_consts=consts), constants)
    new = types.FunctionType(
        code, function.__globals__, "__init__", function.__defaults__, function.__closure__
    )
    new.__kwdefaults__ = function.__kwdefaults__
    # In the place of the original: it says ``super().__init__()`` of the class that it was written in.
    return type(kind.__name__, (kind,), {"__init__": new, "__module__": kind.__module__})


def _other(value: Any, constants: Mapping[int, int]) -> Any:
    if isinstance(value, tuple):
        return tuple(_other(v, constants) for v in value)
    return constants.get(value, value) if type(value) is int else value


def _recoded(code: types.CodeType, constants: Mapping[int, int]) -> types.CodeType:
    """The same within list comprehensions, which are code of their own."""
    inner = tuple(
        _recoded(c.replace(co_consts=tuple(_other(x, constants) for x in c.co_consts)), constants)
        if isinstance(c, types.CodeType)
        else c
        for c in code.co_consts
    )
    return code.replace(co_consts=inner)
