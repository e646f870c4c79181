"""Private parts of DeepSpeed: the state dict that Trainer and accelerate save, where experts are shared out.

DeepSpeed gathers over the group of each parameter and keeps rank 0's: of experts that several ranks share it
would keep a part, and save it as if it were all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from zerostart.upstream.patches import RefCountedPatches, replaced
from zerostart.upstream.registry import Lasts, PatchPoint, demand
from zerostart.upstream.shapes import Shape
from zerostart.upstream.versions import DEEPSPEED

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

_METHOD = PatchPoint(
    library=DEEPSPEED,
    owner="deepspeed.runtime.engine:DeepSpeedEngine",
    names=("_zero3_consolidated_16bit_state_dict",),
    why="experts that several ranks share are put together before they are saved",
    lasts=Lasts.MODEL,
    shapes=(
        Shape(
            "deepspeed.runtime.engine:DeepSpeedEngine._zero3_consolidated_16bit_state_dict",
            leads=("exclude_frozen_parameters",),
        ),
        Shape(
            "deepspeed.runtime.engine:DeepSpeedEngine.save_16bit_model",
            has=("self._zero3_consolidated_16bit_state_dict(...)",),
        ),
    ),
)
TOUCHED = (_METHOD,)

#: The whole state dict of a model (True: without frozen parameters) on rank 0 and None elsewhere, or
#: NotImplemented for a model that DeepSpeed gathers by itself.
Whole = Callable[[torch.nn.Module, bool], Any]


class Consolidation(RefCountedPatches):
    """Asks ``whole`` first, while one of the models that it is held for lives; others are as before."""

    def __init__(self, whole: Whole) -> None:
        super().__init__(self._enter)
        self._whole = whole

    def _enter(self, stack: ExitStack) -> None:
        demand(TOUCHED, "Experts that several ranks share would be saved in part; use expert_parallel=1")
        from deepspeed.runtime.engine import DeepSpeedEngine

        (name,) = _METHOD.names
        original = getattr(DeepSpeedEngine, name)

        @functools.wraps(original)
        def consolidated(engine: DeepSpeedEngine, exclude_frozen_parameters: bool = False) -> Any:
            found = self._whole(engine.module, exclude_frozen_parameters)
            return original(engine, exclude_frozen_parameters) if found is NotImplemented else found

        stack.enter_context(replaced(_METHOD, DeepSpeedEngine, name, consolidated))
