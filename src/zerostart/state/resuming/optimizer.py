"""What an optimizer keeps for a model's parameters, taken out and put in: as logical tensors and numbers.

Engines keep it in different places (flat partitions, sub-groups, the parameters themselves), under the same
keys. A tensor of a parameter's shape lies as the parameter's own share does, or as the run of it that the
rank steps; anything with a single element is a number of the parameter.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zerostart.engines import Shard, laid_out
from zerostart.errors import CheckpointError, ConfigError
from zerostart.geometry.layout.flat import narrowed
from zerostart.live.places import Places
from zerostart.recipe import spelling
from zerostart.state.resuming.local_states import is_element_wise
from zerostart.state.resuming.rules import class_of
from zerostart.state.resuming.values import decoded, dtype_of, encoded
from zerostart.upstream.torch.stepped import Member, Stepped, rule_of

logger = logging.getLogger("zerostart")

#: What says how a group was made or is computed here, and not what is computed.
_OWN = ("params", "param_names", "name", "moe", "_ds_source_param_group_id")
_HOW = ("foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True)
class Kept:
    """One tensor that is kept for the parameter ``name``: ``key`` of its state; this rank's share of it."""

    name: str
    key: str
    shard: Shard


def masters_of(steps: Iterable[Stepped], places: Places) -> Iterator[Kept]:
    """The copies that are stepped in the place of parameters, with this rank's share of each."""
    for step in steps:
        if not step.is_parameter:
            for member in step.members:
                yield Kept(
                    name := places.name_of(member.parameter),
                    "master",
                    like(member, places.shards[name], step.tensor),
                )


def moments_of(steps: Iterable[Stepped], places: Places) -> Iterator[Kept]:
    """The tensors of the optimizer's state with an element for each of the parameter's, as they are now.

    Raises ConfigError for what is neither a number nor a tensor.
    """
    for step in steps:
        local = not is_element_wise(step)
        for key, value in step.state.items():
            if not isinstance(key, str) or "/" in key:
                raise ConfigError(
                    f"the optimizer's state {key!r} of {places.name_of(step.members[0].parameter)} cannot be "
                    "saved: its name is to be a string without slashes"
                )
            if _is_number(key, value, step) or (isinstance(value, torch.Tensor) and local):
                continue
            if not isinstance(value, torch.Tensor) or value.shape != step.tensor.shape:
                raise ConfigError(
                    f"the optimizer's state {key!r} of {places.name_of(step.members[0].parameter)} is "
                    f"neither a number nor a tensor, but a {type(value).__name__}: it cannot be saved with "
                    "the parameter. Use an optimizer whose state is tensors and numbers, or save its "
                    "state_dict() by yourself"
                )
            for member in step.members:
                name = places.name_of(member.parameter)
                yield Kept(name, key, like(member, places.shards[name], value))


def like(member: Member, shard: Shard, values: torch.Tensor) -> Shard:
    """The share of a member in what is stepped, or in a tensor like it: one of its state, or the gradient.

    Of a whole parameter each lies in memory in an order of its own.
    """
    whole = tuple(values.shape) == shard.layout.shape and values.numel() == member.count
    if whole and member.first is None and not isinstance(values, DTensor):
        return laid_out(shard, values)
    return share_of(member, shard, flat(values))


def share_of(member: Member, shard: Shard, values: torch.Tensor) -> Shard:
    """The share of a member in the 1-D ``values``, or these where they are the part already."""
    part = values.numel() == member.count
    storage = values if part else values[member.at : member.at + member.count]
    if member.first is None:
        return replace(shard, storage=storage)
    layout = narrowed(shard.layout, member.first, member.first + member.count)
    # Who has the other runs nobody asks here: they have no elements in common.
    return Shard(shard.name, layout, storage, lambda _: layout, shard.stepped)


def gradient_of(name: str, parameter: torch.Tensor, shard: Shard) -> Kept:
    """The gradient that a parameter has, which is stepped itself."""
    assert parameter.grad is not None, "there is one"
    member = Member(parameter, 0, parameter.numel())
    return Kept(name, "gradient", like(member, shard, parameter.grad))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements of a tensor, 1-D, where they lie."""
    held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return held.detach().view(-1)


def _is_number(key: str, value: Any, step: Stepped) -> bool:
    if isinstance(value, (bool, int, float)) or value is None:
        return True
    shaped = step.tensor.dim() == 0 and key != "step"
    return isinstance(value, torch.Tensor) and value.dim() == 0 and not shaped


def taken(steps: Sequence[Stepped], places: Places) -> dict[str, Any]:
    """Everything of the optimizer that is no tensor, as JSON values. Raises ConfigError for other values."""
    if not steps:
        return {}
    numbers: dict[str, dict[str, tuple[Any, list[str]]]] = {}
    groups: dict[int, list[str]] = {}
    for step in steps:
        names = [places.name_of(member.parameter) for member in step.members]
        groups.setdefault(step.group, []).extend(names)
        for key, value in step.state.items():
            if _is_number(key, value, step):
                held = encoded(value, key, {})
                numbers.setdefault(key, {}).setdefault(repr(held), (held, []))[1].extend(names)
    base = steps[0].optimizer
    return {
        "class": class_of(base),
        "rule": rule_of(base),
        "numbers": {key: list(values.values()) for key, values in numbers.items()},
        "groups": [
            {"settings": _settings(base.param_groups[number], number), "parameters": names}
            for number, names in groups.items()
        ],
    }


def _settings(group: Mapping[str, Any], number: int) -> dict[str, Any]:
    tensors: dict[str, torch.Tensor] = {}
    settings = {
        key: encoded(value, f"{key} of parameter group {number}", tensors)
        for key, value in group.items()
        if key not in _OWN
    }
    if tensors:
        raise ConfigError(f"{next(iter(tensors))} is a tensor of several elements, which no setting is")
    return settings


def restored_moments(
    steps: Sequence[Stepped], places: Places, document: Mapping[str, Any], stored: Mapping[str, str]
) -> Iterator[Kept]:
    """Make the state that was saved, and give the tensors that are to be filled; the others are zero.

    ``stored`` has the dtypes of the saved tensors, as safetensors spells them, by ``optimizer/KEY/NAME``.
    What had no state when it was saved has none, and what is there now besides goes. Raises CheckpointError
    where parameters that are stepped together were saved with different numbers.
    """
    keys: dict[str, list[str]] = {}
    for path in stored:
        kind, _, rest = path.partition("/")
        if kind == "optimizer":
            key, _, name = rest.partition("/")
            keys.setdefault(name, []).append(key)
    numbers = _numbers(document)
    for step in steps:
        names = [places.name_of(member.parameter) for member in step.members]
        having = [name for name in names if name in keys or name in numbers]
        if not having:
            step.optimizer.state.pop(step.tensor, None)
            continue
        state = step.optimizer.state[step.tensor]
        counted = dict.fromkeys(key for name in having for key in numbers.get(name, {}))
        filled = dict.fromkeys(key for name in having for key in keys.get(name, ()))
        for key in state.keys() - (counted | filled):  # of steps that are not those of the saved run
            del state[key]
        for key in counted:
            state[key] = _number(key, having, numbers, step, document)
        for key in filled:
            state[key] = values = _room(key, having, state.get(key), step, stored)
            for member, name in zip(step.members, names, strict=True):
                if f"optimizer/{key}/{name}" in stored:
                    yield Kept(name, key, like(member, places.shards[name], values))


def _numbers(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By parameter, the numbers of its state as they were written."""
    found: dict[str, dict[str, Any]] = {}
    for key, values in document.get("numbers", {}).items():
        for value, names in values:
            for name in names:
                found.setdefault(name, {})[key] = value
    return found


def _number(
    key: str,
    names: Sequence[str],
    numbers: Mapping[str, Mapping[str, Any]],
    step: Stepped,
    document: Mapping[str, Any],
) -> Any:
    """The number of a stepped tensor, in the form that its optimizer has it."""
    told = {name: numbers[name][key] for name in names if key in numbers.get(name, {})}
    first, value = next(iter(told.items()))
    plain = _plain(value)
    for name, other in told.items():
        if _plain(other) != plain:
            raise CheckpointError(
                f"{first} was saved with {key}={plain} and {name} with {_plain(other)}, and this engine "
                "steps them together: resume with one that steps each by itself (engine='fsdp2')"
            )
    given = decoded(value, {})
    if class_of(step.optimizer) != document["class"]:
        if _is_torchs(step.optimizer):
            given = torch.tensor(float(plain), dtype=torch.float32, device="cpu")
        elif isinstance(plain, float) and plain.is_integer():
            given = int(plain)
        else:
            given = plain
    group = step.optimizer.param_groups[step.group]
    if isinstance(given, torch.Tensor) and (group.get("capturable") or group.get("fused")):
        given = given.to(step.tensor.device)
    return given


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of torch's, or derives from one, and not from the base of all alone."""
    kinds = set(type(optimizer).__mro__).difference(torch.optim.Optimizer.__mro__)
    return any(kind.__module__.startswith("torch.") for kind in kinds)


def _plain(value: Any) -> Any:
    found = decoded(value, {})
    return found.item() if isinstance(found, torch.Tensor) else found


def _room(
    key: str, names: Sequence[str], held: Any, step: Stepped, stored: Mapping[str, str]
) -> torch.Tensor:
    """A tensor of zeros for one key of a state, the one that is there if it fits."""
    path = next(f"optimizer/{key}/{name}" for name in names if f"optimizer/{key}/{name}" in stored)
    saved = dtype_of(stored[path])
    name = path.split("/", 2)[2]
    stepped = stored.get(f"master/{name}") or stored[f"model/{name}"]
    dtype = saved
    if saved.is_floating_point and stepped != spelling(step.tensor.dtype):
        dtype = step.tensor.dtype  # As torch's optimizers load a state of other precision.
    with torch.no_grad():
        if isinstance(held, torch.Tensor) and held.dtype == dtype and held.shape == step.tensor.shape:
            return held.zero_()
        return torch.zeros_like(step.tensor.detach(), dtype=dtype)


def restore_groups(steps: Sequence[Stepped], places: Places, document: Mapping[str, Any]) -> None:
    """Give each group the settings that its parameters had, wherever they stood in the saved groups.

    Raises CheckpointError for parameters that were not optimized then, and for a group whose parameters had
    different settings.
    """
    saved = {name: group["settings"] for group in document["groups"] for name in group["parameters"]}
    members: dict[int, list[str]] = {}
    for step in steps:
        members.setdefault(step.group, []).extend(places.name_of(m.parameter) for m in step.members)
    new = [name for names in members.values() for name in names if name not in saved]
    if new:
        raise CheckpointError(
            f"{new[0]} and {len(new) - 1} more are optimized now and were not when the state was saved; "
            "freeze them, or start with zerostart.load of the checkpoint's folder model/ and a new optimizer"
        )
    left = sorted(saved.keys() - {name for names in members.values() for name in names})
    if left:
        logger.warning("%s and %d more were optimized, and are not now", left[0], len(left) - 1)
    for number, names in members.items():
        settings = saved[names[0]]
        other = next((name for name in names if saved[name] != settings), None)
        if other is not None:
            raise CheckpointError(
                f"{names[0]} and {other} are in one parameter group now, and were in groups with other "
                "settings when the state was saved; group them as they were"
            )
        for optimizer in {id(step.optimizer): step.optimizer for step in steps}.values():
            _set(optimizer, number, settings, document["class"])


def _set(
    optimizer: torch.optim.Optimizer, number: int, settings: Mapping[str, Any], saved_class: str
) -> None:
    group, same = optimizer.param_groups[number], class_of(optimizer) == saved_class
    for key, value in settings.items():
        if key in _HOW or not (same or key in group or key == "initial_lr"):
            continue
        new, old = decoded(value, {}), group.get(key)
        if isinstance(old, torch.Tensor):
            old.copy_(torch.as_tensor(new, device=old.device))
        else:
            group[key] = new if same or not isinstance(new, torch.Tensor) else new.item()
