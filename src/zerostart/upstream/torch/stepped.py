"""What a torch optimizer steps, and the parameters that it stands for, wherever an engine keeps it."""

from __future__ import annotations

import inspect
import sys
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
from torch.utils.hooks import RemovableHandle

from zerostart.errors import ConfigError
from zerostart.upstream.patches import RefCountedPatches

if TYPE_CHECKING:
    from zerostart.upstream.types import ParameterGroup

#: On a gradient that a step has taken: how often its memory had been written to by then.
_ATTRIBUTE = "_zerostart_taken"
_watched: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
#: Hooks of all steps that are to be removed.
_left: list[RemovableHandle] = []

#: Classes of DeepSpeed's that step by the rule of another, with the same states under the same keys.
_SAME = {"FusedAdam": "Adam", "DeepSpeedCPUAdam": "Adam", "FusedLion": "Lion", "DeepSpeedCPULion": "Lion"}


@dataclass(frozen=True)
class Member:
    """A parameter that a stepped tensor has elements of."""

    parameter: torch.Tensor
    at: int
    count: int
    #: None: they are what this rank holds of the parameter itself. Else those from this one on of the row-
    #: major order of all that the rank holds of it.
    first: int | None = None


@dataclass(frozen=True)
class Stepped:
    """One tensor that ``optimizer`` steps, with its state under it, in its param group number ``group``."""

    optimizer: torch.optim.Optimizer
    tensor: torch.Tensor
    group: int
    members: tuple[Member, ...]

    @property
    def state(self) -> dict[str, Any]:
        """What the optimizer keeps for the tensor now; nothing before the first step, with most."""
        found: dict[str, Any] = self.optimizer.state.get(self.tensor, {})
        return found

    @property
    def is_parameter(self) -> bool:
        """Whether it is the one parameter itself, and no copy of what a rank has of some."""
        return len(self.members) == 1 and self.members[0].parameter is self.tensor


def plain_steps(optimizer: torch.optim.Optimizer) -> list[Stepped]:
    """What an optimizer steps that was given a model's own parameters."""
    return [
        Stepped(optimizer, parameter, number, (Member(parameter, 0, parameter.numel()),))
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    ]


def watch_steps(optimizers: Iterable[torch.optim.Optimizer]) -> bool:
    """Note from now on which step takes a gradient; return whether all ``optimizers`` have done so before."""
    known = True
    for optimizer in optimizers:
        known &= optimizer in _watched or (_all_steps.is_open and _concerns(optimizer))
        if not hasattr(optimizer, "_optimizer_step_post_hooks"):
            raise ConfigError(
                f"{type(optimizer).__name__} does not call torch.optim.Optimizer.__init__, so its steps and "
                "state are unknown: call super().__init__(params, defaults) there, or pass the optimizer "
                "that it wraps"
            )
        if optimizer not in _watched:
            optimizer.register_step_post_hook(_note_taken)
            _watched.add(optimizer)
    return known


def watch_model(model: nn.Module) -> None:
    """The same of all optimizers, made later, that step parameters of ``model``, while it lives."""
    _all_steps.hold(model)


def _enter(stack: ExitStack) -> None:
    while _left:
        _left.pop().remove()
    stack.callback(_remove, register_optimizer_step_post_hook(_look_at))


def _remove(handle: RemovableHandle) -> None:
    """Remove the hook of all steps; from within a step, which iterates over all hooks, later."""
    frame = sys._getframe()
    within = torch.optim.Optimizer.profile_hook_step.__code__.co_filename
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if frame.f_code.co_filename == within:
            _left.append(handle)
            return
    handle.remove()


_all_steps = RefCountedPatches(_enter)


def _adopt(stack: ExitStack) -> None:
    _all_steps.open()
    stack.callback(_all_steps.close)


#: As long as it is open, steps of all that FSDP2 shards are watched, whoever has loaded it.
adopted_steps = RefCountedPatches(_adopt)
_judged: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[object, bool]] = weakref.WeakKeyDictionary()


def _look_at(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if _all_steps.is_open and optimizer not in _watched and _concerns(optimizer):
        _note_taken(optimizer)


def _concerns(optimizer: torch.optim.Optimizer) -> bool:
    firsts = [id(group["params"][0]) for group in optimizer.param_groups if group["params"]]
    by = (firsts, len(_all_steps.holders), adopted_steps.is_open)
    known = _judged.get(optimizer)
    if known is None or known[0] != by:
        ours = {id(p) for model in _all_steps.holders for p in model.parameters()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        known = by, any(id(p) in ours or (by[-1] and isinstance(p, DTensor)) for p in parameters)
        _judged[optimizer] = known
    return known[1]


def _note_taken(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                setattr(parameter.grad, _ATTRIBUTE, _version(parameter.grad))


def has_taken(gradient: torch.Tensor) -> bool:
    """Whether a step has taken ``gradient``, which nobody has added to since."""
    return getattr(gradient, _ATTRIBUTE, None) == _version(gradient)


def _version(gradient: torch.Tensor) -> int:
    with torch.no_grad():  # else it is a view, made for autograd
        return int((gradient.to_local() if isinstance(gradient, DTensor) else gradient)._version)


def rule_of(optimizer: torch.optim.Optimizer) -> str:
    """Return one word for all classes that compute the same from the same state."""
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
    """Whether a group's ``setting`` of torch's optimizers is one that this one goes by."""
    told_only = setting == "amsgrad" and type(optimizer).__name__ in _SAME  # and refused where it is true
    return setting in optimizer.defaults and not told_only


_COMMON = ("state", "param_groups")


def inner_optimizers(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """Other optimizers that ``optimizer`` keeps, by the attributes in which they are, lists and dicts too."""
    found = {}
    for name, value in vars(optimizer).items():
        several = value.values() if isinstance(value, dict) else value
        for one in several if isinstance(value, (dict, list, tuple)) else [value]:
            if isinstance(one, torch.optim.Optimizer):
                found[name] = one
    return found


def own_values(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the optimizer's class adds to a state dict. Raises ConfigError where it cannot be asked."""
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return {}
    try:
        found = _shell(optimizer).state_dict()
        return {key: value for key, value in found.items() if key not in _COMMON}
    except Exception as error:  # its own code, whatever that raises
        raise ConfigError(
            f"the optimizer {type(optimizer).__name__} cannot be saved, because its state_dict() "
            f"fails ({error})"
        ) from error


def _shell(optimizer: torch.optim.Optimizer) -> Any:
    shell: object = object.__new__(type(optimizer))
    vars(shell).update(vars(optimizer), state=defaultdict(dict))
    return shell
