"""Private parts of DeepSpeed: experts of its ZeRO stage 2, for modules that are not DeepSpeed's own.

A parameter with ``allreduce=False`` and a ``group_name`` is an expert to DeepSpeed
(``moe.utils.is_moe_param``): its gradient is summed over the ranks that hold the same experts, divided by all
ranks, and its optimizer state partitioned over the former. That holds where the engine has seen layers of its
own, and where the optimizer has parameter groups of experts alone, with ``moe=True`` and the name of their
process groups. For models with our mark on a parameter, and no others, these methods of ``DeepSpeedEngine``
do otherwise:

- ``_configure_optimizer``: the engine has experts for as long as it makes the optimizer, and gets one whose
  groups are of experts or of others alone (``deepspeed_split_groups``);
- ``save_checkpoint`` and ``save_16bit_model``, which would write the experts of one rank as if they were
  all: refused.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from zerostart.errors import EngineError, UnsupportedVersionError
from zerostart.upstream.deepspeed_experts import ExpertGroups
from zerostart.upstream.deepspeed_split_groups import split_groups, split_optimizer

__all__ = ["mark_flat_expert"]

_ATTRIBUTE = "_zerostart_flat_expert"
_METHODS = ("_configure_optimizer", "save_checkpoint", "save_16bit_model")


def mark_flat_expert(parameter: Any, groups: ExpertGroups) -> None:
    """Have the optimizer state of ``parameter`` partitioned, and its gradient reduced, among its owners."""
    _enter()
    parameter.allreduce = False
    parameter.group_name = groups.name
    setattr(parameter, _ATTRIBUTE, True)


def _expert_of(parameter: Any) -> str | None:
    """The name of the process groups of an expert of ours; None for other parameters."""
    return parameter.group_name if hasattr(parameter, _ATTRIBUTE) else None


def _ours(parameters: Iterable[Any]) -> bool:
    return any(_expert_of(parameter) is not None for parameter in parameters)


@functools.cache
def _enter() -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    absent = [name for name in _METHODS if not hasattr(DeepSpeedEngine, name)]
    if absent:
        raise UnsupportedVersionError(
            f"DeepSpeedEngine has no {', '.join(absent)}; zerostart knows DeepSpeed 0.19. Use zero_stage=3"
        )
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

    engine: Any = DeepSpeedEngine
    engine._configure_optimizer = configure_optimizer
    engine.save_checkpoint = _refusing(DeepSpeedEngine.save_checkpoint)
    engine.save_16bit_model = _refusing(DeepSpeedEngine.save_16bit_model)


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
    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _ours(self.module.parameters()):
            raise EngineError(
                f"{original.__name__} would save the experts of one rank as if they were all, at ZeRO stage "
                "2 with expert_parallel; use zerostart.full_tensors(engine), or zero_stage=3"
            )
        return original(self, *args, **kwargs)

    return save
