"""One rule for what is given to a verb of the front door: of the kind that its signature names, or refused.

A signature says it once, for readers and type checkers; here it is held against the values, so that no verb
asks by itself, and none goes on with a 2.0 or a "no" until something else fails, or nothing does. What may be
given by name or by path (a dtype, a configuration) is read here. Imports nothing that is heavy.
"""

from __future__ import annotations

import numbers
import os
import reprlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerostart.errors import ConfigError, ZerostartError

if TYPE_CHECKING:
    import torch

#: By what annotations call them: classes, or where one is that need not be imported, and the words for it.
_KINDS: dict[str, tuple[type | tuple[str, str] | tuple[type, ...], str]] = {
    "None": (type(None), "None"),
    "bool": (bool, "True or False"),
    "int": (numbers.Integral, "a whole number"),
    "float": (numbers.Real, "a number"),
    "str": (str, "a string"),
    "os.PathLike": (os.PathLike, "a path"),
    "Mapping": (Mapping, "a dictionary"),
    "Sequence": (Collection, "a list"),  # of names, whose order does not matter
    "EngineConfig": ((Mapping, str, os.PathLike), "a dictionary, the path of a JSON file"),
    "torch.dtype": (("torch", "dtype"), "a torch.dtype"),
    "nn.Module": (("torch.nn", "Module"), "a module"),
    "DiffusionPipeline": (("diffusers", "DiffusionPipeline"), "a diffusers pipeline"),
}

#: What to do about a configuration that cannot be read.
_JSON = "give a JSON file; an accelerate configuration (YAML) names DeepSpeed's as deepspeed_config_file"


def check_arguments(verb: Callable[..., object], given: Mapping[str, Any], collective: bool = True) -> None:
    """Raise ConfigError for the first of the ``given`` arguments that is not of the kind that ``verb`` names.

    Where all ranks make the call (``collective``), it is raised on all of them. What an annotation calls by
    a name of its own (``Source``) is left to the verb.
    """
    with checked_arguments(verb, given, collective):
        pass


@contextmanager
def checked_arguments(
    verb: Callable[..., object], given: Mapping[str, Any], collective: bool = True
) -> Iterator[None]:
    """``check_arguments``; inside, what ``verb`` reads of them may raise, which is told in the same way."""
    try:
        wrong = next(filter(None, (_mistake(name, verb, value) for name, value in given.items())), None)
        if wrong is not None:
            raise ConfigError(wrong)
        yield
    except Exception as mistake:
        # What other libraries raise, too: the ranks that have read their arguments wait for this one.
        error: Exception = mistake
        if isinstance(mistake, ZerostartError):
            error = type(mistake)(f"zerostart.{verb.__name__}: {mistake}")
            error.__cause__ = mistake
        if not collective:
            raise error from error.__cause__
        from zerostart.distributed.world import current_world

        with current_world().phase(f"arguments of {verb.__name__}"):
            raise error from error.__cause__


def dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """``dtype`` itself, or the one of that name. Raises ConfigError for a name that is none."""
    if not isinstance(dtype, str):
        return dtype
    import torch

    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype={dtype!r} is not a torch dtype; try float32, bfloat16 or float16")
    return found


def config_of(config: Mapping[str, object] | str | os.PathLike[str] | None) -> Mapping[str, object] | None:
    """``config`` itself, or what the JSON file at that path holds.

    Raises ConfigError, which names the file, for one that cannot be read and for one that holds no object.
    """
    if config is None or isinstance(config, Mapping):
        return config
    from zerostart.checkpoint.strict_json import DAMAGED, MAX_CONFIG_BYTES, read_json

    try:
        return read_json(Path(config), "configuration", MAX_CONFIG_BYTES)
    except (ZerostartError, TypeError, ValueError) as error:
        raise ConfigError(f"engine_config: {str(error).replace(DAMAGED, _JSON)}") from error


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
    found: Any = known
    if isinstance(known, tuple) and isinstance(known[0], str):
        found = getattr(sys.modules.get(known[0]), str(known[1]), None)
    if found is None or (isinstance(value, bool) and kind in ("int", "float")):
        return False
    # A string is a collection of its letters, which nobody means.
    return isinstance(value, found) and not (kind == "Sequence" and isinstance(value, str))
