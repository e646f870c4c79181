"""Private parts of DeepSpeed: the parameter groups of its optimizers of ZeRO stages 1 and 2.

They partition a group of experts among the ranks that hold the same ones, and keep each group in one flat
buffer. So where a client's group has experts and others, or parameters of several loads (or of none), each
with a buffer of its own, ``DeepSpeedEngine._configure_optimizer`` gets an optimizer, or parameters, with a
group for each (``deepspeed_split_groups``), and no buffer is copied to be one with another. The engine is
told that it has experts for as long as that takes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from zerostart.upstream.deepspeed.zero12.marks import expert_of, marked
from zerostart.upstream.deepspeed.zero12.split_groups import Kind, split_groups, split_optimizer
from zerostart.upstream.patches import RefCountedPatches, replaced
from zerostart.upstream.registry import Lasts, PatchPoint
from zerostart.upstream.shapes import Shape
from zerostart.upstream.versions import DEEPSPEED

_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_CONFIGURE = PatchPoint(
    library=DEEPSPEED,
    owner=_ENGINE,
    names=("_configure_optimizer",),
    attributes=("has_moe_layers",),
    why="its groups are of experts or of others, and of one load, alone; the engine has experts meanwhile",
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
TOUCHED = (_CONFIGURE,)


def _enter(stack: ExitStack) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    configure = DeepSpeedEngine._configure_optimizer

    @functools.wraps(configure)
    def configure_optimizer(self: Any, client_optimizer: Any, model_parameters: Any) -> Any:
        parameters = list(self.module.parameters())
        ours = any(expert_of(p) is not None or marked(p) is not None for p in parameters)
        if self.has_moe_layers or not ours or not self.zero_optimization():
            return configure(self, client_optimizer, model_parameters)
        self.has_moe_layers = any(expert_of(p) is not None and p.requires_grad for p in parameters)
        try:
            return configure(self, *_split(client_optimizer, model_parameters))
        finally:
            self.has_moe_layers = False

    stack.enter_context(replaced(_CONFIGURE, DeepSpeedEngine, "_configure_optimizer", configure_optimizer))


#: In place while a parameter lives that needs it.
grouping = RefCountedPatches(_enter)


def _kind(parameter: Any) -> Kind:
    mark = marked(parameter)
    return Kind(expert_of(parameter), None if mark is None else id(mark.keeper))


def _split(client: Any, parameters: Sequence[Any]) -> tuple[Any, Any]:
    """The client's optimizer (or what makes it) and parameters, with groups of one kind each."""
    if isinstance(client, torch.optim.Optimizer):
        return split_optimizer(client, _kind), parameters
    if client is not None:
        return (lambda given: split_optimizer(client(given), _kind)), parameters
    # DeepSpeed makes the optimizer. It splits a list of parameters by experts, and of groups only named ones.
    if not any(isinstance(item, dict) for item in parameters):
        if len({_kind(parameter).home for parameter in parameters}) == 1:
            return client, parameters
        parameters = [{"params": list(parameters)}]
    if not any("moe" in group for group in parameters):
        parameters = split_groups(parameters, _kind)
    return client, parameters
