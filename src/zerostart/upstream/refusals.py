"""Where code is not as a replacement needs it: calls of it on loaded models are refused, and no others.

A load puts replacements in place for calls that may come later, or never. So what does not fit is an error
when it is called, not when it is put.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

from zerostart.errors import UnsupportedVersionError
from zerostart.upstream.patches import RefCountedPatches, replaced, replaced_wherever_imported
from zerostart.upstream.registry import PatchPoint, Touched, misfit
from zerostart.upstream.shapes import found


def fits(
    stack: ExitStack,
    patches: RefCountedPatches,
    points: Sequence[Touched],
    remedy: str,
    calls: Iterable[PatchPoint] | None = None,
) -> bool:
    """Whether the installed libraries fit ``points``.

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
        owner = found(point.owner)
    except (ImportError, AttributeError):
        return  # and nobody calls it
    for name in point.names:
        original = inspect.getattr_static(owner, name, None)
        inner = getattr(original, "__func__", original)
        if not callable(inner):
            continue
        new: Any = _refusing(inner, patches, text, of_object=not inspect.ismodule(owner))
        if inspect.ismodule(owner):
            stack.enter_context(replaced_wherever_imported(point, name, original, new))
        else:
            bound = isinstance(original, classmethod | staticmethod)
            stack.enter_context(replaced(point, owner, name, type(original)(new) if bound else new))


def _refusing(original: Any, patches: RefCountedPatches, text: str, of_object: bool) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _concerns((*args, *kwargs.values()), patches, of_object):
            raise UnsupportedVersionError(text)
        return original(*args, **kwargs)

    return call


def _concerns(arguments: Iterable[Any], patches: RefCountedPatches, of_object: bool) -> bool:
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


def _models(argument: Any) -> Iterator[nn.Module]:
    """The model that an argument of a call is, or those that a trainer, an accelerator or a pipeline has."""
    if isinstance(argument, nn.Module):
        yield argument
    else:
        own = getattr(argument, "__dict__", {}).values()
        candidates = (getattr(argument, "model", None), *(getattr(argument, "_models", None) or ()), *own)
        yield from (model for model in candidates if isinstance(model, nn.Module))
