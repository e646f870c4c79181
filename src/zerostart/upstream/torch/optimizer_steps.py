"""Tensors that a torch optimizer steps, with their parameters."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from zerostart.errors import ConfigError
from zerostart.upstream.patches import RefCountedPatches

if TYPE_CHECKING:
    from zerostart.upstream.types import ParameterGroup

#: Attribute of a gradient that a step has used: its version at that time.
_ATTRIBUTE = "_zerostart_taken"
_watched: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

#: Classes of DeepSpeed that compute the same as another class, with the same state.
_SAME = {"FusedAdam": "Adam", "DeepSpeedCPUAdam": "Adam", "FusedLion": "Lion", "DeepSpeedCPULion": "Lion"}


@dataclass(frozen=True)
class Member:
    """Part of a parameter in a stepped tensor: ``count`` elements from ``at`` on."""

    parameter: torch.Tensor
    at: int
    count: int
    #: First element in the row-major order of this rank's part; None for the part itself.
    first: int | None = None


@dataclass(frozen=True)
class SteppedTensor:
    """Tensor that ``optimizer`` steps, in its parameter group number ``group``."""

    optimizer: torch.optim.Optimizer
    tensor: torch.Tensor
    group: int
    members: tuple[Member, ...]

    @property
    def state(self) -> dict[str, Any]:
        """Optimizer state of the tensor; usually empty before the first step."""
        state: dict[str, Any] = self.optimizer.state.get(self.tensor, {})
        return state

    @property
    def is_parameter(self) -> bool:
        """True if the tensor is a parameter, not a master."""
        return len(self.members) == 1 and self.members[0].parameter is self.tensor


def plain_steps(optimizer: torch.optim.Optimizer) -> list[SteppedTensor]:
    """List the parameters of an optimizer as stepped tensors."""
    return [
        SteppedTensor(optimizer, parameter, number, (Member(parameter, 0, parameter.numel()),))
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    ]


def watch_steps(optimizers: Iterable[torch.optim.Optimizer]) -> bool:
    """Watch the steps of ``optimizers``; return True if all were watched before."""
    were_watched = True
    for optimizer in optimizers:
        were_watched &= optimizer in _watched or (_all_steps.is_open and _concerns(optimizer))
        if not hasattr(optimizer, "_optimizer_step_post_hooks"):
            raise ConfigError(
                f"{type(optimizer).__name__} does not call torch.optim.Optimizer.__init__, so its steps and "
                "state are unknown: call super().__init__(params, defaults) there, or pass the optimizer "
                "that it wraps"
            )
        if optimizer not in _watched:
            optimizer.register_step_post_hook(_mark_taken)
            _watched.add(optimizer)
    return were_watched


def watch_model(model: nn.Module) -> None:
    """Watch the steps of all optimizers of ``model`` while it lives."""
    _all_steps.hold(model)


@functools.cache
def _register_hook() -> None:
    # Never removed: a step that iterates over the hooks would fail.
    register_optimizer_step_post_hook(_watch_if_ours)


_all_steps = RefCountedPatches(lambda _: _register_hook())


def _adopt(stack: ExitStack) -> None:
    _all_steps.open()
    stack.callback(_all_steps.close)


#: While it is open, steps of all FSDP2 shards are watched.
adopted_steps = RefCountedPatches(_adopt)
_is_ours: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[object, bool]] = weakref.WeakKeyDictionary()


def _watch_if_ours(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if _all_steps.is_open and optimizer not in _watched and _concerns(optimizer):
        _mark_taken(optimizer)


def _concerns(optimizer: torch.optim.Optimizer) -> bool:
    firsts = [id(group["params"][0]) for group in optimizer.param_groups if group["params"]]
    key = (firsts, len(_all_steps.holders), adopted_steps.is_open)
    judgement = _is_ours.get(optimizer)
    if judgement is None or judgement[0] != key:
        ours = {id(p) for model in _all_steps.holders for p in model.parameters()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        judgement = key, any(id(p) in ours or (key[-1] and isinstance(p, DTensor)) for p in parameters)
        _is_ours[optimizer] = judgement
    return judgement[1]


def _mark_taken(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                setattr(parameter.grad, _ATTRIBUTE, _version(parameter.grad))


def has_taken(gradient: torch.Tensor) -> bool:
    """Return True if a step has used ``gradient``, without later additions."""
    return getattr(gradient, _ATTRIBUTE, None) == _version(gradient)


def _version(gradient: torch.Tensor) -> int:
    with torch.no_grad():  # otherwise it is a view for autograd
        return int((gradient.to_local() if isinstance(gradient, DTensor) else gradient)._version)


def rule_of(optimizer: torch.optim.Optimizer) -> str:
    """Return one name for all classes that compute the same from the same state."""
    kind = type(optimizer)
    step: Any = inspect.unwrap(kind.step)
    owner = step.__qualname__.partition(".")[0]
    torchs = step.__module__.startswith("torch.optim.") and owner != torch.optim.Optimizer.__name__
    rule = _SAME.get(kind.__name__, owner if torchs else kind.__name__)
    if rule == "Adam" and any(_decouples(optimizer, group) for group in optimizer.param_groups):
        return "AdamW"
    return rule


def _decouples(optimizer: torch.optim.Optimizer, group: ParameterGroup) -> bool:
    return bool(group.get("decoupled_weight_decay", getattr(optimizer, "adam_w_mode", False)))


def computes(optimizer: torch.optim.Optimizer, setting: str) -> bool:
    """Return True if the optimizer uses a group's ``setting``."""
    # DeepSpeed's classes have amsgrad in their defaults, and refuse it.
    is_unused = setting == "amsgrad" and type(optimizer).__name__ in _SAME
    return setting in optimizer.defaults and not is_unused


_COMMON = ("state", "param_groups")


def inner_optimizers(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers in the attributes of ``optimizer``, also in lists and dicts."""
    inner = {}
    for name, value in vars(optimizer).items():
        items = value.values() if isinstance(value, dict) else value
        for one in items if isinstance(value, (dict, list, tuple)) else [value]:
            if isinstance(one, torch.optim.Optimizer):
                inner[name] = one
    return inner


def own_values(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the keys that the class adds to a state dict; raises ConfigError."""
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return {}
    try:
        state = _shell(optimizer).state_dict()
        return {key: value for key, value in state.items() if key not in _COMMON}
    except Exception as error:  # of any type
        raise ConfigError(
            f"the optimizer {type(optimizer).__name__} cannot be saved, because its state_dict() "
            f"fails ({error})"
        ) from error


def _shell(optimizer: torch.optim.Optimizer) -> Any:
    shell: object = object.__new__(type(optimizer))
    vars(shell).update(vars(optimizer), state=defaultdict(dict))
    return shell
