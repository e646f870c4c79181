"""One rule for what is given to a verb of the front door: of the kind that its signature names, or refused.

A signature says it once, for readers and type checkers; here it is held against the values, so that no verb
asks by itself, and none goes on with a 2.0 or a "no" until something else fails, or nothing does.
Imports nothing that is heavy.
"""

from __future__ import annotations

import numbers
import os
import reprlib
import sys
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any

from zerostart.errors import ConfigError

__all__ = ["check_arguments"]

#: By what annotations call them: classes, or where one is that need not be imported, and the words for it.
_KINDS: dict[str, tuple[type | tuple[str, str], str]] = {
    "None": (type(None), "None"),
    "bool": (bool, "True or False"),
    "int": (numbers.Integral, "a whole number"),
    "float": (numbers.Real, "a number"),
    "str": (str, "a string"),
    "os.PathLike": (os.PathLike, "a path"),
    "Mapping": (Mapping, "a dictionary"),
    "Sequence": (Collection, "a list"),  # of names, whose order does not matter
    "torch.dtype": (("torch", "dtype"), "a torch.dtype"),
    "nn.Module": (("torch.nn", "Module"), "a module"),
    "DiffusionPipeline": (("diffusers", "DiffusionPipeline"), "a diffusers pipeline"),
}


def check_arguments(verb: Callable[..., object], given: Mapping[str, Any], collective: bool = True) -> None:
    """Raise ConfigError for the first of the ``given`` arguments that is not of the kind that ``verb`` names.

    Where all ranks make the call (``collective``), it is raised on all of them. What an annotation calls by
    a name of its own (``Source``) is left to the verb.
    """
    wrong = next(filter(None, (_mistake(name, verb, value) for name, value in given.items())), None)
    if wrong is None:
        return
    error = ConfigError(f"zerostart.{verb.__name__}: {wrong}")
    if not collective:
        raise error
    from zerostart.distributed.world import current_world

    with current_world().phase(f"arguments of {verb.__name__}"):
        raise error


def _mistake(name: str, verb: Callable[..., object], value: object) -> str | None:
    """What is wrong with ``value``, if anything is."""
    parts = _parts(verb.__annotations__[name])
    if not parts.keys() <= _KINDS.keys() or any(_is(part, value) for part in parts):
        return None
    accepted = " or ".join(_KINDS[part][1] + inner for part, inner in parts.items())
    return f"{name}={reprlib.repr(value)} is not accepted; give {accepted}"


@cache
def _parts(annotation: str) -> dict[str, str]:
    """The alternatives of an annotation, without what stands in brackets; that in words, where it matters."""
    parts, depth, part = dict[str, str](), 0, ""
    for letter in annotation + "|":
        depth += (letter == "[") - (letter == "]")
        if letter == "|" and depth == 0:
            kind, _, inner = part.strip().partition("[")
            parts[kind] = " of strings" if (kind, inner) == ("Sequence", "str]") else ""
            part = ""
        else:
            part += letter
    return parts


def _is(kind: str, value: object) -> bool:
    known = _KINDS[kind][0]
    # A class whose module is not imported has no objects yet.
    found = known if isinstance(known, type) else getattr(sys.modules.get(known[0]), known[1], None)
    if found is None or (isinstance(value, bool) and kind in ("int", "float")):
        return False
    # A string is a collection of its letters, which nobody means.
    return isinstance(value, found) and not (kind == "Sequence" and isinstance(value, str))
