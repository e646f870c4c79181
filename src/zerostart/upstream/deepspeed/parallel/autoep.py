"""Private parts of DeepSpeed: its AutoEP, where the experts of a model are shared out already.

The section ``expert_parallel`` has the engine look for mixtures of experts in a whole model, and replace them
by layers of its own. For a model with our mark on a parameter there is nothing left to do.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any

from zerostart.errors import EngineError
from zerostart.upstream.patches import RefCountedPatches, replaced
from zerostart.upstream.registry import Lasts, PatchPoint, demand
from zerostart.upstream.shapes import Shape
from zerostart.upstream.versions import DEEPSPEED

_ATTRIBUTE = "_zerostart_shared_expert"
_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_CONFIGURE = PatchPoint(
    library=DEEPSPEED,
    owner=_ENGINE,
    names=("_configure_expert_parallel",),
    attributes=("_config",),
    why="experts that are shared out already are not looked for and replaced",
    lasts=Lasts.MODEL,
    shapes=(
        Shape(
            f"{_ENGINE}._configure_expert_parallel",
            leads=("model",),
            has=("X = self._config.expert_parallel_config", "return ReplacementSourceMap()"),
        ),
        Shape("deepspeed.module_inject.auto_ep_layer:ReplacementSourceMap", leads=()),
    ),
)
TOUCHED = (_CONFIGURE,)


def note_shared(parameter: Any, ranks: int) -> None:
    """Have the engine of ``parameter``, of experts that ``ranks`` ranks share, leave them as they are."""
    demand(TOUCHED, "Use engine='fsdp2'")
    setattr(parameter, _ATTRIBUTE, (ranks, _held.ticket()))


def _enter(stack: ExitStack) -> None:
    from deepspeed.module_inject.auto_ep_layer import ReplacementSourceMap
    from deepspeed.runtime.engine import DeepSpeedEngine

    original = DeepSpeedEngine._configure_expert_parallel

    @functools.wraps(original)
    def configure(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        section = self._config.expert_parallel_config
        shared = {mark[0] for p in model.parameters() if (mark := getattr(p, _ATTRIBUTE, None))}
        if not shared or section is None or not section.enabled:
            return original(self, model, *args, **kwargs)
        if shared != {section.autoep_size}:
            raise EngineError(
                f"the configuration of deepspeed.initialize has autoep_size={section.autoep_size}, and the "
                f"model was loaded with expert_parallel={max(shared)}; use one number for both"
            )
        return ReplacementSourceMap()

    (name,) = _CONFIGURE.names
    stack.enter_context(replaced(_CONFIGURE, DeepSpeedEngine, name, configure))


_held = RefCountedPatches(_enter)
