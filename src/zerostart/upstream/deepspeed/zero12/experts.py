"""Private parts of DeepSpeed: experts of its ZeRO stages 1 and 2, for modules that are not DeepSpeed's own.

A parameter with ``allreduce=False`` and a ``group_name`` is an expert to DeepSpeed
(``moe.utils.is_moe_param``): its gradient is summed over the ranks that hold the same experts, divided by all
ranks, and its optimizer state partitioned over the former. That holds where the engine has seen layers of its
own, and where the optimizer has parameter groups of experts alone, with ``moe=True`` and the name of their
process groups (``deepspeed_grouping``). For models with our mark on a parameter, and no others,
``DeepSpeedEngine.module_state_dict``, of which ``save_checkpoint`` and ``save_16bit_model`` write what they
save, and which has the experts of one rank as if they were all, is refused. (``save_checkpoint`` under
``zerostart.enable()`` is ``zerostart.save_state``, and does not come here.)
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any

from zerostart.errors import EngineError
from zerostart.upstream.deepspeed.parallel.experts import ExpertGroups
from zerostart.upstream.deepspeed.zero12.grouping import TOUCHED as GROUPING
from zerostart.upstream.deepspeed.zero12.grouping import grouping
from zerostart.upstream.deepspeed.zero12.marks import expert_of, mark_expert_of
from zerostart.upstream.patches import RefCountedPatches, replaced
from zerostart.upstream.registry import Lasts, PatchPoint, demand
from zerostart.upstream.shapes import Shape
from zerostart.upstream.versions import DEEPSPEED

_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_OPTIMIZER = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_MARKS = PatchPoint(
    library=DEEPSPEED,
    owner=_OPTIMIZER,
    writes=("allreduce", "group_name", "tensor_model_parallel"),
    why="a gradient is summed over the ranks that hold the same experts, and divided by all batches; "
    "every rank counts its own in the norm, also where ranks share tensors",
    lasts=Lasts.MODEL,
    shapes=(
        Shape(
            "deepspeed.moe.utils:is_moe_param", has=("hasattr(param, 'allreduce') and not param.allreduce",)
        ),
        Shape(
            "deepspeed.runtime.utils:is_model_parallel_parameter",
            has=("if hasattr(p, 'tensor_model_parallel') and p.tensor_model_parallel: ...",),
        ),
        Shape(
            f"{_OPTIMIZER}.get_grad_norm_direct",
            has=("if is_model_parallel_parameter(p) or self.model_parallel_rank == 0: ...",),
        ),
        Shape(f"{_OPTIMIZER}.is_moe_group", has=("'moe' in group and group['moe']",)),
        Shape(
            f"{_OPTIMIZER}._configure_moe_settings",
            has=("self.real_dp_process_group[I] = self.expert_dp_process_group[G['name']]",),
        ),
    ),
)
_SAVING = PatchPoint(
    library=DEEPSPEED,
    owner=_ENGINE,
    names=("module_state_dict",),
    why="it has the experts of one rank as if they were all, and would be saved so: refused",
    lasts=Lasts.MODEL,
    shapes=(
        Shape(f"{_ENGINE}._save_checkpoint", has=("X = self.module_state_dict(...)",)),
        Shape(f"{_ENGINE}.save_16bit_model", has=("X = self.module_state_dict(...)",)),
    ),
)
TOUCHED = (_MARKS, _SAVING)


def mark_flat_expert(parameter: Any, groups: ExpertGroups) -> None:
    """Have the optimizer state of ``parameter`` partitioned, and its gradient reduced, among its owners."""
    demand((*TOUCHED, *GROUPING), "Use zero_stage=3")
    parameter.allreduce = False
    parameter.group_name = groups.name
    parameter.tensor_model_parallel = True
    mark_expert_of(parameter, _held.ticket())


def _enter(stack: ExitStack) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    grouping.open()
    stack.callback(grouping.close)
    stack.enter_context(
        replaced(_SAVING, DeepSpeedEngine, "module_state_dict", _refusing(DeepSpeedEngine.module_state_dict))
    )


_held = RefCountedPatches(_enter)


def _refusing(original: Any) -> Any:
    @functools.wraps(original)
    def module_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(expert_of(p) is not None for p in self.module.parameters()):
            raise EngineError(
                "DeepSpeed would save the experts of one rank as if they were all, with expert_parallel at "
                "ZeRO stages 1 and 2; use zerostart.save_state(path, engine) or zerostart.save(engine, path)"
                ", or call zerostart.enable() first, with which engine.save_checkpoint does that"
            )
        return original(self, *args, **kwargs)

    return module_state_dict
