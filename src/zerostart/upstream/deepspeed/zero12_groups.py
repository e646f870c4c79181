"""Marks and optimizer groups of parameters that are loaded for ZeRO stages 1 and 2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from zerostart.upstream.guard import Function, Use
from zerostart.upstream.patches import RefCountedPatches, Ticket, wrap

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

    from zerostart.upstream.types import ParameterGroup

#: Reads parts of parameters into 1-D tensors: ``(name, first element, tensor)``.
#: Collective, with the same parameters in the same order; each rank has its own parts.
RunReader = Callable[[Sequence[tuple[str, int, torch.Tensor]]], None]

_ATTRIBUTE = "_zerostart_flat"


#: Owner of the flat buffers of one load. ``bring()`` moves buffers to the device; collective. ``adopt(groups,
#: partitions, round_robin, aligned)`` returns the buffer of each group with its parameters in order, or None.
#: ``optimizer`` is a weak reference to the optimizer.
Keeper: TypeAlias = Any


@dataclass(frozen=True)
class FlatBufferMark:
    """Mark of a parameter for the engine; it pickles as None, without its buffer."""

    name: str
    keeper: Keeper
    reader: RunReader | None
    ticket: Ticket

    def __reduce__(self) -> Any:
        return type(None), ()


def set_mark(parameter: torch.Tensor, new: FlatBufferMark) -> None:
    """Replace the mark of a parameter."""
    setattr(parameter, _ATTRIBUTE, new)


def mark_of(parameter: torch.Tensor) -> FlatBufferMark | None:
    """Return the mark of a parameter, or None."""
    return getattr(parameter, _ATTRIBUTE, None)


def mark_expert_of(parameter: Any, ticket: Ticket) -> None:
    """Mark an expert that ranks share; its ``group_name`` names its process groups."""
    parameter._zerostart_flat_expert = ticket


def expert_of(parameter: Any) -> str | None:
    """Return the name of the process groups of a marked expert, or None."""
    return parameter.group_name if hasattr(parameter, "_zerostart_flat_expert") else None


TOUCHED = (
    Use(
        "deepspeed.runtime.engine:DeepSpeedEngine",
        "_configure_optimizer(client_optimizer, model_parameters), _configure_zero_optimizer, "
        ".has_moe_layers",
        "its optimizer groups are split into experts and other parameters",
    ),
)


def _enter(stack: ExitStack) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    wrap(stack, DeepSpeedEngine, "_configure_optimizer", _configure_optimizer)


def _configure_optimizer(
    original: Function, engine: DeepSpeedEngine, client_optimizer: object, model_parameters: Any
) -> object:
    parameters = list(engine.module.parameters())
    ours = any(expert_of(p) is not None or mark_of(p) is not None for p in parameters)
    # DeepSpeed's own MoE layers come with split groups; stage 0 partitions none.
    if engine.has_moe_layers or not ours or not engine.zero_optimization():
        return original(engine, client_optimizer, model_parameters)
    engine.has_moe_layers = any(expert_of(p) is not None and p.requires_grad for p in parameters)
    try:
        return original(engine, *_split(client_optimizer, model_parameters))
    finally:
        engine.has_moe_layers = False


grouping = RefCountedPatches(_enter)


def _group_key(parameter: torch.Tensor) -> GroupKey:
    mark = mark_of(parameter)
    return GroupKey(expert_of(parameter), None if mark is None else id(mark.keeper))


def _split(client: Any, parameters: Sequence[Any]) -> tuple[object, object]:
    if isinstance(client, torch.optim.Optimizer):
        return split_optimizer(client, _group_key), parameters
    if client is not None:
        return (lambda groups: split_optimizer(client(groups), _group_key)), parameters
    if not any(isinstance(item, dict) for item in parameters):
        if len({_group_key(parameter).keeper_id for parameter in parameters}) == 1:
            return client, parameters
        parameters = [{"params": list(parameters)}]
    if not any("moe" in group for group in parameters):
        parameters = split_groups(parameters, _group_key)
    return client, parameters


class GroupKey(NamedTuple):
    """Common properties of the parameters of one optimizer group."""

    #: Name of the process groups of experts, or None.
    expert: str | None = None
    #: Identity of the owner of their flat buffers, or None.
    keeper_id: int | None = None


GroupKeyOf = Callable[[torch.Tensor], GroupKey]

_OWN = frozenset({"params", "param_names", "moe", "name"})
_LISTS = ("params", "param_names")


class _Follower(dict[str, Any]):
    follow: Callable[[], None]

    def __getitem__(self, key: str) -> object:
        self.follow()
        return super().__getitem__(key)


def split_groups(groups: Sequence[ParameterGroup], key_of: GroupKeyOf) -> list[ParameterGroup]:
    """Split each group into its parts, experts last."""
    return [{**group, **part} for group in groups for part in _parts(group, key_of)]


def split_optimizer(client: torch.optim.Optimizer, key_of: GroupKeyOf) -> torch.optim.Optimizer:
    """Return ``client``, or an optimizer that shares its state and hooks, with a group for each part.

    The first part is the client's own dictionary, which schedulers refer to. The others follow its settings.
    """
    groups: list[ParameterGroup] = []
    followers: list[tuple[_Follower, ParameterGroup, ParameterGroup]] = []
    for group in client.param_groups:
        first, *others = _parts(group, key_of) or [{}]
        groups.append(group)
        for part in others:
            follower = _Follower({**group, **part})
            groups.append(follower)
            followers.append((follower, group, dict(group)))
        group.update(first)
    if not followers:
        return client
    # The constructor's arguments are unknown. State, defaults and hooks are the client's objects.
    split: Any = object.__new__(type(client))
    vars(split).update({name: value for name, value in vars(client).items() if name != "step"})
    split.param_groups = list(groups)
    owner: Any = client  # The hooks keep it alive: some optimizers free shared state when they end.

    def follow(*_: object) -> None:
        """Copy the settings that a scheduler has changed in the leaders."""
        for follower, leader, seen in followers:
            changed = {k: v for k, v in leader.items() if k not in _OWN and seen.get(k, _OWN) is not v}
            follower.update(changed)
            seen.update(leader)

    def settle(*_: object) -> None:
        owner._opt_called = True  # A scheduler of the client warns otherwise.
        for _follower, leader, seen in followers:
            seen.update(leader)

    def loaded(optimizer: torch.optim.Optimizer) -> None:
        if optimizer is split:
            for kept, new in zip(groups, split.param_groups, strict=True):
                kept.update(new)
            split.param_groups[:] = groups
            owner.state = split.state

    for follower, _, _ in followers:
        follower.follow = follow
    split.register_step_pre_hook(follow)
    split.register_step_post_hook(settle)
    split.register_load_state_dict_post_hook(loaded)
    result: torch.optim.Optimizer = split
    return result


def _parts(group: ParameterGroup, key_of: GroupKeyOf) -> list[ParameterGroup]:
    """List the parts of a group, experts last; each has a trained parameter."""
    kinds = [key_of(parameter) for parameter in group["params"]]
    trained = {kind for kind, p in zip(kinds, group["params"], strict=True) if p.requires_grad and p.numel()}
    if trained:
        usual = min((kind for kind in kinds if kind in trained), key=_is_of_experts)
        kinds = [kind if kind in trained else usual for kind in kinds]
    listed = [key for key in _LISTS if key in group]
    parts = []
    for kind in sorted(dict.fromkeys(kinds), key=_is_of_experts):
        own = {key: [x for x, k in zip(group[key], kinds, strict=True) if k == kind] for key in listed}
        parts.append(own if kind.expert is None else {**own, "moe": True, "name": kind.expert})
    return parts


def _is_of_experts(kind: GroupKey) -> bool:
    return kind.expert is not None
