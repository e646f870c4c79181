"""Modules of DiffSynth-Studio that print the shapes of their weights, which partitions of ZeRO-3 do not have.

DeepSpeed makes a text of the whole model when its engine begins, whether that is logged or not.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

from torch import nn

from zerostart.upstream.patches import Held, replaced
from zerostart.upstream.registry import Lasts, PatchPoint
from zerostart.upstream.versions import DIFFSYNTH

__all__ = ["TOUCHED", "keep_printable"]

_MODULE = "diffsynth.models.wan_video_animate_adapter"
_CONVOLUTION = PatchPoint(
    library=DIFFSYNTH,
    owner="diffsynth.models.wan_video_animate_adapter:EqualConv2d",
    names=("__repr__",),
    why="prints the shape of its weight, of which a partition has none: DeepSpeed prints what it is given",
    lasts=Lasts.MODEL,
)
_LINEAR = PatchPoint(
    library=DIFFSYNTH,
    owner="diffsynth.models.wan_video_animate_adapter:EqualLinear",
    names=("__repr__",),
    why="the same",
    lasts=Lasts.MODEL,
)
TOUCHED = (_CONVOLUTION, _LINEAR)


def keep_printable(model: nn.Module) -> None:
    """Let ``model`` be printed in partitions, as long as it lives."""
    kinds = tuple(kind for _, kind in _kinds())
    if kinds and any(isinstance(module, kinds) for module in model.modules()):
        _printable.hold(model)


def _kinds() -> list[tuple[PatchPoint, Any]]:
    module = sys.modules.get(_MODULE)
    return [(point, getattr(module, point.owner.partition(":")[2])) for point in TOUCHED if module]


def _put(stack: ExitStack) -> None:
    for point, kind in _kinds():
        stack.enter_context(replaced(point, kind, "__repr__", _printing(kind.__repr__)))


def _printing(original: Any) -> Any:
    def __repr__(self: nn.Module) -> str:
        weight = self._parameters["weight"]
        text: str = original(self) if weight is not None and weight.dim() > 1 else nn.Module.__repr__(self)
        return text

    return __repr__


_printable = Held(_put)
