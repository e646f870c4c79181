"""Private parts of DeepSpeed: the engine of a model that is in slices already, and its groups of ranks.

The engine that gets such a model finds the slicing done (``ds_autotp_parsed``). Where its configuration does
not say how many ranks share tensors, the model says it; where it says something else, that is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerostart.errors import EngineError
from zerostart.upstream.deepspeed.parallel.slices import slices_of
from zerostart.upstream.deepspeed.zero3 import partitions as upstream
from zerostart.upstream.patches import RefCountedPatches, Ticket, replaced
from zerostart.upstream.registry import Lasts, PatchPoint, Use, demand
from zerostart.upstream.shapes import Shape
from zerostart.upstream.versions import DEEPSPEED

_ATTRIBUTE = "_zerostart_tensors"
_SUMMED = "_ds_grad_allreduce_registered"
_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_CONSTRUCTION = PatchPoint(
    library=DEEPSPEED,
    owner=_ENGINE,
    names=("_configure_expert_parallel",),
    attributes=("_config",),
    why="the first step that gets the model: an engine of one in slices shares tensors, as if configured",
    lasts=Lasts.MODEL,
    shapes=(
        Shape(f"{_ENGINE}._configure_expert_parallel", leads=("model",)),
        Shape(
            f"{_ENGINE}.__init__",
            has=(
                "self._configure_expert_parallel(model, ...)",
                "if self.autotp_size() > 1: ...",
            ),
        ),
        Shape(f"{_ENGINE}.autotp_size", has=("return self._config.tensor_parallel_config.autotp_size",)),
    ),
)
TOUCHED = (
    _CONSTRUCTION,
    Use(
        library=DEEPSPEED,
        owner="deepspeed.utils.groups",
        names=("_init_tp_mesh_device", "get_data_parallel_group"),
        why="DeepSpeed's own groups of ranks that share tensors, which a process makes once",
    ),
    Use(
        library=DEEPSPEED,
        owner="deepspeed.module_inject.auto_tp:AutoTP",
        names=("register_replicated_grad_hooks",),
        why="its mark tells which whole parameters have gradients that ranks add up",
        shapes=(
            Shape(
                "deepspeed.module_inject.auto_tp:AutoTP.register_replicated_grad_hooks",
                has=("param.register_hook(...)", "param._ds_grad_allreduce_registered = True"),
            ),
        ),
    ),
)
#: What of the section decides which layers are cut, and how.
_DECIDING = ("preset_model", "partition_config", "vocab_parallel_lm_head")


class TensorGroups:
    """This rank's group of those that share tensors, and of those that hold the same slices.

    Collective: DeepSpeed makes the groups, once in a process. Raises EngineError where it has made them of
    another size. See ``require_layers``.
    """

    def __init__(self, size: int) -> None:
        upstream.join_group()
        from deepspeed.utils import groups

        private: Any = groups
        private._init_tp_mesh_device(tensor_model_parallel_size=size)
        self.tensors: dist.ProcessGroup = private.get_tensor_model_parallel_group()
        self.owners: dist.ProcessGroup = private.get_data_parallel_group()
        made = dist.get_world_size(self.tensors)
        if made != size:
            raise EngineError(
                f"tensor_parallel={size}, but this process has made groups of {made} ranks before, and "
                f"DeepSpeed keeps one size for its life; use tensor_parallel={made}, or another process"
            )


@dataclass(frozen=True)
class _Mark:
    """What a model in slices tells its engine: how many ranks share tensors, by which rules."""

    size: int
    rules: Mapping[str, Any]
    group: dist.ProcessGroup
    ticket: Ticket

    def __deepcopy__(self, memo: Any) -> _Mark:
        return self


def mark_sliced(model: nn.Module, size: int, section: Mapping[str, Any], groups: TensorGroups) -> None:
    """Have the engine of ``model`` share tensors over ``size`` ranks, as long as the model lives."""
    demand(TOUCHED, "Use engine='fsdp2'")
    for name in slices_of(model):
        # AutoTP forgets it of embeddings, such as T5's of relative positions.
        sliced: Any = model.get_parameter(name)
        sliced.tensor_model_parallel = True
    told = {key: section[key] for key in _DECIDING if section.get(key) is not None}
    marked: Any = model
    marked.__dict__[_ATTRIBUTE] = _Mark(size, told, groups.tensors, _held.ticket())


def restore_hooks(model: nn.Module) -> None:
    """Have gradients that are partial on each rank summed, as the parameters that were replaced had it."""
    mark = _marked(model)
    for parameter in model.parameters():
        if mark is not None and getattr(parameter, _SUMMED, False) and parameter.requires_grad:
            hooked: Any = parameter
            hooked.register_hook(functools.partial(_summed, mark.group))


def _summed(group: dist.ProcessGroup, gradient: torch.Tensor) -> torch.Tensor:
    total = gradient.contiguous()
    dist.all_reduce(total, group=group)
    return total


def _marked(model: Any) -> _Mark | None:
    """What a loaded model in slices tells its engine; None for any other model."""
    found: _Mark | None = getattr(model, "__dict__", {}).get(_ATTRIBUTE)
    return found


def _enter(stack: ExitStack) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    original = DeepSpeedEngine._configure_expert_parallel

    @functools.wraps(original)
    def configure_expert_parallel(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        for module in model.modules():
            mark = _marked(module)
            if mark is not None:
                _agree(self._config.tensor_parallel_config, mark)
                model.ds_autotp_parsed = True  # It may be a module around the one that was loaded.
        return original(self, model, *args, **kwargs)

    (name,) = _CONSTRUCTION.names
    stack.enter_context(replaced(_CONSTRUCTION, DeepSpeedEngine, name, configure_expert_parallel))


_held = RefCountedPatches(_enter)


def _agree(config: Any, mark: _Mark) -> None:
    """Let an engine's configuration say what the model was loaded with, or raise EngineError."""
    from deepspeed.module_inject import layers

    if config.autotp_size not in (0, mark.size):
        raise EngineError(
            f"the model was loaded with tensor_parallel={mark.size}, and the configuration of "
            f"deepspeed.initialize has autotp_size={config.autotp_size}; use one number for both"
        )
    asked = {key: value for key in _DECIDING if (value := getattr(config, key)) is not None}
    if asked and asked != mark.rules:
        names = ", ".join(key for key in _DECIDING if asked.get(key) != mark.rules.get(key))
        raise EngineError(
            f"the tensor_parallel section of deepspeed.initialize has another {names} than the one that the "
            "model was loaded with; pass one configuration to both"
        )
    config.autotp_size = mark.size
    layers.set_autotp_mode(training=True)
