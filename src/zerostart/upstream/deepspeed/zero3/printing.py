"""The text of the whole model that DeepSpeed makes when ZeRO-3 begins, whether that is logged or not.

Modules of DiffSynth-Studio, and others that it keeps on disk, print shapes of weights that are not there:
their parameters are partitions, or None.
"""

from __future__ import annotations

import functools
import sys
from contextlib import ExitStack
from typing import Any

from torch import nn

from zerostart.upstream.patches import RefCountedPatches, replaced
from zerostart.upstream.registry import Lasts, PatchPoint, demand
from zerostart.upstream.shapes import Shape
from zerostart.upstream.versions import DEEPSPEED

_MODULE = "deepspeed.runtime.zero.stage3"
_OPTIMIZER = "DeepSpeedZeroOptimizer_Stage3"
_BEGINNING = PatchPoint(
    library=DEEPSPEED,
    owner=f"{_MODULE}:{_OPTIMIZER}",
    names=("__init__",),
    why="a text of the model is made where it begins, of modules that print what they do not have: meanwhile "
    "the text of its class is the name",
    lasts=Lasts.MODEL,
    shapes=(Shape(f"{_MODULE}:{_OPTIMIZER}.__init__", leads=("module",)),),
)
TOUCHED = (_BEGINNING,)


def keep_printable(model: nn.Module) -> None:
    """Let DeepSpeed begin with ``model``, or what it is a part of, whatever that prints."""
    if _MODULE in sys.modules:
        _printable.hold(model)


def _put(stack: ExitStack) -> None:
    demand(TOUCHED)
    owner = getattr(sys.modules[_MODULE], _OPTIMIZER)
    original = owner.__init__

    @functools.wraps(original)
    def __init__(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        kind = type(module)
        with replaced(_BEGINNING, kind, "__repr__", lambda _: f"{kind.__name__}()"):
            original(self, module, *args, **kwargs)

    stack.enter_context(replaced(_BEGINNING, owner, "__init__", __init__))


_printable = RefCountedPatches(_put)
