"""Private parts of DeepSpeed: an engine of another ZeRO stage than the one that its model was loaded for.

Stages 1 and 2 would find partitions without elements, in the first forward; and no stage but the load's kind
knows experts that ranks share. So the engine's constructor refuses, before anything is moved.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn

from zerostart.errors import EngineError
from zerostart.upstream.patches import RefCountedPatches, replaced
from zerostart.upstream.registry import Lasts, Otherwise, PatchPoint, Use, misfit
from zerostart.upstream.shapes import Shape
from zerostart.upstream.versions import DEEPSPEED

logger = logging.getLogger("zerostart")

_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_STAGE = PatchPoint(
    library=DEEPSPEED,
    owner=_ENGINE,
    names=("_configure_expert_parallel",),
    why="the first step that gets the model: an engine of another stage than the load's is refused",
    lasts=Lasts.MODEL,
    otherwise=Otherwise.STOCK,
    shapes=(
        Shape(f"{_ENGINE}._configure_expert_parallel", leads=("model",)),
        Shape(f"{_ENGINE}.__init__", has=("self._configure_expert_parallel(model, ...)",)),
    ),
)
TOUCHED = (
    _STAGE,
    Use(
        library=DEEPSPEED,
        owner=_ENGINE,
        names=("zero_optimization_stage",),
        why="the stage of an engine, as its configuration has it",
    ),
)

#: Says of a number whether an engine of that ZeRO stage takes the model.
Takes = Callable[[int], bool]
#: Of each loaded model, what it was loaded for, and which engines take it.
_loaded: weakref.WeakKeyDictionary[nn.Module, tuple[str, Takes]] = weakref.WeakKeyDictionary()


def keep_stage(model: nn.Module, title: str, takes: Takes) -> None:
    """Have ``deepspeed.initialize`` refuse ``model``, loaded for ``title``, where no engine takes it."""
    _loaded[model] = title, takes
    _held.hold(model)


def _enter(stack: ExitStack) -> None:
    if wrong := misfit(TOUCHED):
        logger.warning("%s. An engine of another ZeRO stage than a model's load fails by itself", wrong)
        return
    from deepspeed.runtime.engine import DeepSpeedEngine

    name = _STAGE.names[0]
    original = getattr(DeepSpeedEngine, name)

    @functools.wraps(original)
    def configure_expert_parallel(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        stage = self.zero_optimization_stage()
        for module in model.modules():
            title, takes = _loaded.get(module, ("", None))
            if takes is not None and not takes(stage):
                raise EngineError(
                    f"{type(module).__name__} was loaded for {title}, and the configuration of "
                    f"deepspeed.initialize has ZeRO stage {stage}; use one number for both"
                )
        return original(self, model, *args, **kwargs)

    stack.enter_context(replaced(_STAGE, DeepSpeedEngine, name, configure_expert_parallel))


_held = RefCountedPatches(_enter)
