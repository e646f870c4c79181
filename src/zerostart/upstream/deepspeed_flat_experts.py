"""Private parts of DeepSpeed: experts of its ZeRO stages 1 and 2, for modules that are not DeepSpeed's own.

A parameter with ``allreduce=False`` and a ``group_name`` is an expert to DeepSpeed
(``moe.utils.is_moe_param``): its gradient is summed over the ranks that hold the same experts, divided by all
ranks, and its optimizer state partitioned over the former. That holds where the engine has seen layers of its
own, and where the optimizer has parameter groups of experts alone, with ``moe=True`` and the name of their
process groups. For models with our mark on a parameter, and no others, these methods of ``DeepSpeedEngine``
do otherwise:

- ``_configure_optimizer``: the engine has experts for as long as it makes the optimizer, and gets one whose
  groups are of experts or of others alone (``deepspeed_split_groups``);
- ``module_state_dict``, of which ``save_checkpoint`` and ``save_16bit_model`` write what they save, and
  which has the experts of one rank as if they were all: refused. (``save_checkpoint`` under
  ``zerostart.enable()`` is ``zerostart.save_state``, and does not come here.)
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch

from zerostart.errors import EngineError
from zerostart.upstream.deepspeed_experts import ExpertGroups
from zerostart.upstream.deepspeed_split_groups import split_groups, split_optimizer
from zerostart.upstream.patches import Held, replaced
from zerostart.upstream.registry import Lasts, PatchPoint, Shape, demand
from zerostart.upstream.versions import DEEPSPEED

__all__ = ["TOUCHED", "mark_flat_expert"]

_ATTRIBUTE = "_zerostart_flat_expert"
_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_OPTIMIZER = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_CONFIGURE = PatchPoint(
    library=DEEPSPEED,
    owner=_ENGINE,
    names=("_configure_optimizer",),
    attributes=("has_moe_layers",),
    why="the engine has experts while it makes the optimizer, whose groups are of experts or of others alone",
    lasts=Lasts.MODEL,
    shapes=(
        Shape(
            f"{_ENGINE}._configure_optimizer",
            leads=("client_optimizer", "model_parameters"),
            has=("configure_moe_param_groups(P)", "client_optimizer(P)", "self._configure_zero_optimizer(O)"),
        ),
        Shape(
            f"{_ENGINE}._configure_zero_optimizer",
            has=(
                "Z(..., has_moe_layers=self.has_moe_layers, "
                "expert_data_parallel_group=E if self.has_moe_layers else None)",
            ),
        ),
    ),
)
_MARKS = PatchPoint(
    library=DEEPSPEED,
    owner=_OPTIMIZER,
    writes=("allreduce", "group_name"),
    why="a gradient is summed over the ranks that hold the same experts, and divided by all ranks",
    lasts=Lasts.MODEL,
    shapes=(
        Shape(
            "deepspeed.moe.utils:is_moe_param", has=("hasattr(param, 'allreduce') and not param.allreduce",)
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
TOUCHED = (_CONFIGURE, _MARKS, _SAVING)


def mark_flat_expert(parameter: Any, groups: ExpertGroups) -> None:
    """Have the optimizer state of ``parameter`` partitioned, and its gradient reduced, among its owners."""
    demand(TOUCHED, "Use zero_stage=3")
    parameter.allreduce = False
    parameter.group_name = groups.name
    setattr(parameter, _ATTRIBUTE, _held.ticket())


def _expert_of(parameter: Any) -> str | None:
    """The name of the process groups of an expert of ours; None for other parameters."""
    return parameter.group_name if hasattr(parameter, _ATTRIBUTE) else None


def _ours(parameters: Iterable[Any]) -> bool:
    return any(_expert_of(parameter) is not None for parameter in parameters)


def _enter(stack: ExitStack) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    configure = DeepSpeedEngine._configure_optimizer

    @functools.wraps(configure)
    def configure_optimizer(self: Any, client_optimizer: Any, model_parameters: Any) -> Any:
        if self.has_moe_layers or not _ours(self.module.parameters()):
            return configure(self, client_optimizer, model_parameters)
        self.has_moe_layers = True
        try:
            return configure(self, *_split(client_optimizer, model_parameters))
        finally:
            self.has_moe_layers = False

    stack.enter_context(replaced(_CONFIGURE, DeepSpeedEngine, "_configure_optimizer", configure_optimizer))
    stack.enter_context(
        replaced(_SAVING, DeepSpeedEngine, "module_state_dict", _refusing(DeepSpeedEngine.module_state_dict))
    )


_held = Held(_enter)


def _split(client: Any, parameters: Any) -> tuple[Any, Any]:
    """The client's optimizer (or what makes it) and parameters, with experts in groups of their own."""
    if isinstance(client, torch.optim.Optimizer):
        return split_optimizer(client, _expert_of), parameters
    if client is not None:
        return (lambda given: split_optimizer(client(given), _expert_of)), parameters
    # DeepSpeed makes the optimizer. It splits a list of parameters, and of groups only those with a name.
    if parameters and isinstance(parameters[0], dict) and not any("moe" in group for group in parameters):
        parameters = split_groups(parameters, _expert_of)
    return client, parameters


def _refusing(original: Any) -> Any:
    @functools.wraps(original)
    def module_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _ours(self.module.parameters()):
            raise EngineError(
                "DeepSpeed would save the experts of one rank as if they were all, with expert_parallel at "
                "ZeRO stages 1 and 2; use zerostart.save_state(path, engine) or zerostart.save(engine, path)"
                ", or call zerostart.enable() first, with which engine.save_checkpoint does that"
            )
        return original(self, *args, **kwargs)

    return module_state_dict
