"""State dicts that DeepSpeed would make of a part of the experts, and calls of models that nothing gathers.

With experts that ranks share, DeepSpeed's state dict at stages 1 and 2 has those of one rank as if they were
all: it is refused. At stage 3 it keeps rank 0's: Trainer and accelerate get the whole by ``Consolidation``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerostart.errors import EngineError
from zerostart.upstream.deepspeed.zero12.marks import expert_of
from zerostart.upstream.guard import Use, demand, misfit
from zerostart.upstream.patches import RefCountedPatches, fits, replaced

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
OWN_STATE_DICT = Use(
    _ENGINE,
    "module_state_dict(destination, prefix, keep_vars, exclude_frozen_parameters), _save_checkpoint, "
    "save_16bit_model",
    "a state dict with the experts of one rank as if they were all is refused",
)
_REGISTERED = Use(
    "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload",
    "_register_deepspeed_module",
    "a module whose partitions are gathered for its calls has a number",
)
_CONSOLIDATED = Use(
    "deepspeed.runtime.engine:DeepSpeedEngine",
    "_zero3_consolidated_16bit_state_dict(exclude_frozen_parameters), save_16bit_model",
    "experts that several ranks share are put together before they are saved",
)
TOUCHED = (OWN_STATE_DICT, _REGISTERED, _CONSOLIDATED)


def check_called(module: nn.Module) -> None:
    """Raise EngineError for a call of a module whose partitions nothing gathers."""
    if hasattr(module, "ds_id") or not _are_registered():
        return
    for name, inner in module.named_modules():
        own = (leaf for leaf, parameter in inner._parameters.items() if _is_hollow(parameter))
        leaf = None if hasattr(inner, "ds_id") else next(own, None)
        if leaf is not None:
            where = f"{name}.{leaf}".lstrip(".")
            raise EngineError(
                f"{type(module).__name__} is called, but {where} is sharded (ZeRO-3), and nothing "
                "gathers it yet: call deepspeed.initialize or accelerator.prepare first, load a model "
                "that is not trained with zerostart.load_pipeline, or gather it with "
                "deepspeed.zero.GatheredParameters"
            )


@functools.cache
def _are_registered() -> bool:
    """Whether modules that DeepSpeed gathers can be told."""
    return not misfit((_REGISTERED,))


def _is_hollow(parameter: Any) -> bool:
    return hasattr(parameter, "ds_id") and not parameter.numel() and parameter.ds_numel > 0


def _enter(stack: ExitStack) -> None:
    if not fits(stack, own_state_dicts, (OWN_STATE_DICT,), "Use zerostart.save and save_state"):
        return
    from deepspeed.runtime.engine import DeepSpeedEngine

    name = "module_state_dict"
    original = getattr(DeepSpeedEngine, name)

    @functools.wraps(original)
    def module_state_dict(engine: DeepSpeedEngine, *args: object, **kwargs: object) -> object:
        if any(expert_of(p) is not None for p in engine.module.parameters()):
            raise EngineError(
                "with expert_parallel at ZeRO stages 1 and 2 DeepSpeed would save the experts of one "
                "rank as if they were all; use zerostart.save_state(path, engine) or "
                "zerostart.save(engine, path), or call zerostart.enable() first, which makes "
                "engine.save_checkpoint do the same"
            )
        return original(engine, *args, **kwargs)

    stack.enter_context(replaced(DeepSpeedEngine, name, module_state_dict))


#: In place while a model lives whose own state dict is not all of it.
own_state_dicts = RefCountedPatches(_enter)


#: The whole state dict of a model (True: without frozen parameters) on rank 0 and None elsewhere, or
#: NotImplemented for a model that DeepSpeed gathers by itself.
Whole = Callable[[torch.nn.Module, bool], object]


class Consolidation(RefCountedPatches):
    """Asks ``whole`` first, while one of the models that it is held for lives; others are as before."""

    def __init__(self, whole: Whole) -> None:
        super().__init__(self._enter)
        self._whole = whole

    def _enter(self, stack: ExitStack) -> None:
        demand(
            (_CONSOLIDATED,), "Experts that several ranks share would be saved in part; use expert_parallel=1"
        )
        from deepspeed.runtime.engine import DeepSpeedEngine

        name = "_zero3_consolidated_16bit_state_dict"
        original = getattr(DeepSpeedEngine, name)

        @functools.wraps(original)
        def consolidated(engine: DeepSpeedEngine, exclude_frozen_parameters: bool = False) -> Any:
            found = self._whole(engine.module, exclude_frozen_parameters)
            return original(engine, exclude_frozen_parameters) if found is NotImplemented else found

        stack.enter_context(replaced(DeepSpeedEngine, name, consolidated))
