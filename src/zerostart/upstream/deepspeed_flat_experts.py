"""Private parts of DeepSpeed: experts of its ZeRO stage 2, for modules that are not DeepSpeed's own.

A parameter with ``allreduce=False`` and a ``group_name`` is an expert to DeepSpeed
(``moe.utils.is_moe_param``): its gradient is summed over the ranks that hold the same experts, divided by all
ranks, and its optimizer state partitioned over the former. That holds where the engine has seen layers of its
own, and where the optimizer has parameter groups of experts alone, with ``moe=True`` and the name of their
process groups. For parameters with our mark, and no others, these are replaced:

- ``DeepSpeedEngine._configure_optimizer``: the engine has experts for as long as it makes the optimizer;
- ``torch.optim.Optimizer.add_param_group``: a group is split into experts and the rest, before a scheduler
  has counted the groups;
- ``DeepSpeedEngine.save_checkpoint`` and ``save_16bit_model``, which would write the experts of one rank as
  if they were all: refused.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from zerostart.errors import EngineError, UnsupportedVersionError
from zerostart.upstream.deepspeed_experts import ExpertGroups

__all__ = ["mark_flat_expert"]

_ATTRIBUTE = "_zerostart_flat_expert"
_METHODS = ("_configure_optimizer", "save_checkpoint", "save_16bit_model")


def mark_flat_expert(parameter: Any, groups: ExpertGroups) -> None:
    """Have the optimizer state of ``parameter`` partitioned, and its gradient reduced, among its owners."""
    _enter()
    parameter.allreduce = False
    parameter.group_name = groups.name
    setattr(parameter, _ATTRIBUTE, True)


def _ours(parameters: Iterable[Any]) -> list[Any]:
    return [p for p in parameters if hasattr(p, _ATTRIBUTE)]


@functools.cache
def _enter() -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    absent = [name for name in _METHODS if not hasattr(DeepSpeedEngine, name)]
    if absent:
        raise UnsupportedVersionError(
            f"DeepSpeedEngine has no {', '.join(absent)}; zerostart knows DeepSpeed 0.19. Use zero_stage=3"
        )
    configure, add = DeepSpeedEngine._configure_optimizer, torch.optim.Optimizer.add_param_group

    @functools.wraps(configure)
    def configure_optimizer(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.has_moe_layers or not _ours(self.module.parameters()):
            return configure(self, *args, **kwargs)
        self.has_moe_layers = True
        try:
            return configure(self, *args, **kwargs)
        finally:
            self.has_moe_layers = False

    @functools.wraps(add)
    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        for part in _split(param_group):
            add(self, part)

    engine: Any = DeepSpeedEngine
    engine._configure_optimizer = configure_optimizer
    engine.save_checkpoint = _refusing(DeepSpeedEngine.save_checkpoint)
    engine.save_16bit_model = _refusing(DeepSpeedEngine.save_16bit_model)
    optimizer: Any = torch.optim.Optimizer
    optimizer.add_param_group = add_param_group


def _split(group: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The group without our experts, and a group of them."""
    given = group.get("params")
    if given is None or isinstance(given, (torch.Tensor, set)):
        yield group  # A single tensor, or what torch refuses.
        return
    items = list(given)
    tensors = [item[1] if isinstance(item, tuple) else item for item in items]
    experts = [item for item, tensor in zip(items, tensors, strict=True) if hasattr(tensor, _ATTRIBUTE)]
    if not experts:
        yield {**group, "params": items}
        return
    first = experts[0][1] if isinstance(experts[0], tuple) else experts[0]
    if len(experts) < len(items):
        rest = [i for i, t in zip(items, tensors, strict=True) if not hasattr(t, _ATTRIBUTE)]
        yield {**group, "params": rest}
    yield {**group, "params": experts, "moe": True, "name": first.group_name}


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
