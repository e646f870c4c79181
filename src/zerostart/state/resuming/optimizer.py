"""What an optimizer keeps for a model's parameters, taken out and put in: as logical tensors and numbers.

Engines keep it in different places (flat partitions, sub-groups, the parameters themselves), under the same
keys. A tensor of a parameter's shape lies as the parameter's own share does, or as the run of it that the
rank steps; anything with a single element is a number of the parameter.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from zerostart.checkpoint.strict_json import JsonMapping
from zerostart.engines import Stepped
from zerostart.errors import CheckpointError, ConfigError
from zerostart.live.training import LiveTraining, StateTensor, is_number, share_of
from zerostart.recipe import spelling
from zerostart.state.resuming.values import decoded, dtype_of, encoded
from zerostart.upstream.torch.optimizer_values import inner_optimizers, own_values
from zerostart.upstream.torch.stepped import computes, rule_of

logger = logging.getLogger("zerostart")

#: What says how a group was made or is computed here, and not what is computed.
_OWN = ("params", "param_names", "name", "moe", "_ds_source_param_group_id")
_HOW = ("foreach", "fused", "capturable", "differentiable")


def optimizer_document(training: LiveTraining) -> dict[str, object]:
    """Everything of the optimizer that is no tensor, as JSON values. Raises ConfigError for other values."""
    steps = training.steps
    if not steps:
        return {}
    check_saveable(training)
    numbers: dict[str, dict[str, tuple[Any, list[str]]]] = {}
    groups: dict[int, list[str]] = {}
    for step in steps:
        names = [training.name_of(member.parameter) for member in step.members]
        groups.setdefault(step.group, []).extend(names)
        for key, value in step.state.items():
            if is_number(key, value, step):
                # Most parameters have the same number (their step): it is written once, with the names that
                # have it.
                # By its written form: numbers may be tensors, floats or integers, and are the same where that
                # is.
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


def _settings(group: Mapping[str, object], number: int) -> dict[str, object]:
    tensors: dict[str, torch.Tensor] = {}
    settings = {
        key: encoded(value, f"{key} of parameter group {number}", tensors)
        for key, value in group.items()
        if key not in _OWN
    }
    if tensors:
        raise ConfigError(
            f"{next(iter(tensors))} is a tensor of several elements, but a setting of the "
            "optimizer must be one number"
        )
    return settings


def restored_moments(
    training: LiveTraining, document: Mapping[str, object], stored: Mapping[str, str]
) -> Iterator[StateTensor]:
    """Make the state that was saved, and give the tensors that are to be filled; the others are zero.

    ``stored`` has the dtypes of the saved tensors, as safetensors spells them, by ``optimizer/KEY/NAME``.
    What had no state when it was saved has none, and what is there now besides goes. Raises CheckpointError
    where parameters that are stepped together were saved with different numbers.
    """
    # Three spaces of keys meet here: paths of the checkpoint (``optimizer/KEY/NAME``), names of parameters,
    # and the tensors that are stepped, each of one parameter or of runs of many. Here the first is turned
    # round: the keys of the state by parameter.
    keys: dict[str, list[str]] = {}
    for path in stored:
        kind, _, rest = path.partition("/")
        if kind == "optimizer":
            key, _, name = rest.partition("/")
            keys.setdefault(name, []).append(key)
    numbers = _numbers(document)
    for step in training.steps:
        names = [training.name_of(member.parameter) for member in step.members]
        # Of the parameters in this step, those that had a state when it was saved. The others' elements stay
        # zero.
        having = [name for name in names if name in keys or name in numbers]
        if not having:
            # As if it had never been stepped: the optimizer makes the state anew at its first step.
            step.optimizer.state.pop(step.tensor, None)
            continue
        state = step.optimizer.state[step.tensor]
        # A dict and no set: its order decides the order of the state's keys, which must be one on all ranks.
        counted = dict.fromkeys(key for name in having for key in numbers.get(name, {}))
        filled = dict.fromkeys(key for name in having for key in keys.get(name, ()))
        for key in state.keys() - (counted | filled):  # of steps that are not those of the saved run
            del state[key]
        for key in counted:
            state[key] = _number(key, having, numbers, step, document)
        for key in filled:
            # One room for all members of the step; then each member's own part of it is what is read into.
            state[key] = values = _room(key, having, state.get(key), step, stored)
            for member, name in zip(step.members, names, strict=True):
                if f"optimizer/{key}/{name}" in stored:
                    yield StateTensor(name, key, share_of(member, training.shards[name], values))


def _numbers(document: JsonMapping) -> dict[str, dict[str, object]]:
    """By parameter, the numbers of its state as they were written."""
    found: dict[str, dict[str, object]] = {}
    for key, values in document.get("numbers", {}).items():
        for value, names in values:
            for name in names:
                found.setdefault(name, {})[key] = value
    return found


def _number(
    key: str,
    names: Sequence[str],
    numbers: Mapping[str, Mapping[str, object]],
    step: Stepped,
    document: JsonMapping,
) -> object:
    """The number of a stepped tensor, in the form that its optimizer has it."""
    told = {name: numbers[name][key] for name in names if key in numbers.get(name, {})}
    first, value = next(iter(told.items()))
    plain = _plain(value)
    for name, other in told.items():
        if _plain(other) != plain:
            raise CheckpointError(
                f"{first} was saved with {key}={plain}, but {name} with {_plain(other)}, and this "
                "engine updates them together: resume with an engine that updates each by itself "
                "(engine='fsdp2')"
            )
    # The class of the optimizer decides how a number lies in the state: torch's own have tensors (``step``),
    # others numbers.
    given = decoded(value, {})
    if class_of(step.optimizer) != document["class"]:
        if _is_torchs(step.optimizer):
            # torch's optimizers keep ``step`` as a float32 tensor on the host.
            given = torch.tensor(float(plain), dtype=torch.float32, device="cpu")
        elif isinstance(plain, float) and plain.is_integer():
            given = int(plain)
        else:
            given = plain
    group = step.optimizer.param_groups[step.group]
    # A fused or capturable step reads its number on the device.
    if isinstance(given, torch.Tensor) and (group.get("capturable") or group.get("fused")):
        given = given.to(step.tensor.device)
    return given


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of torch's, or derives from one, and not from the base of all alone."""
    kinds = set(type(optimizer).__mro__).difference(torch.optim.Optimizer.__mro__)
    return any(kind.__module__.startswith("torch.") for kind in kinds)


def _plain(value: object) -> Any:
    found = decoded(value, {})
    return found.item() if isinstance(found, torch.Tensor) else found


def _room(
    key: str, names: Sequence[str], held: object, step: Stepped, stored: Mapping[str, str]
) -> torch.Tensor:
    """A tensor of zeros for one key of a state, the one that is there if it fits."""
    path = next(f"optimizer/{key}/{name}" for name in names if f"optimizer/{key}/{name}" in stored)
    saved = dtype_of(stored[path])
    name = path.split("/", 2)[2]
    # The dtype of what was stepped when the state was saved: the master's, where there was one.
    stepped = stored.get(f"master/{name}") or stored[f"model/{name}"]
    dtype = saved
    if saved.is_floating_point and stepped != spelling(step.tensor.dtype):
        dtype = step.tensor.dtype  # As torch's optimizers load a state of other precision.
    with torch.no_grad():
        if isinstance(held, torch.Tensor) and held.dtype == dtype and held.shape == step.tensor.shape:
            return held.zero_()
        return torch.zeros_like(step.tensor.detach(), dtype=dtype)


def restore_groups(training: LiveTraining, document: JsonMapping) -> None:
    """Give each group the settings that its parameters had, wherever they stood in the saved groups.

    Raises CheckpointError for parameters that were not optimized then, and for a group whose parameters had
    different settings.
    """
    # Settings go by parameter, not by the number of a group: groups may be put together otherwise now.
    saved = {name: group["settings"] for group in document["groups"] for name in group["parameters"]}
    members: dict[int, list[str]] = {}
    for step in training.steps:
        members.setdefault(step.group, []).extend(training.name_of(m.parameter) for m in step.members)
    new = [name for names in members.values() for name in names if name not in saved]
    if new:
        raise CheckpointError(
            f"{new[0]} and {len(new) - 1} more are optimized now and were not when the state was saved; "
            "freeze them, or start with zerostart.load of the checkpoint's folder model/ and a new optimizer"
        )
    left = sorted(saved.keys() - {name for names in members.values() for name in names})
    if left:
        logger.warning(
            "%s and %d more were trained by the optimizer that was saved, but are not in this optimizer",
            left[0],
            len(left) - 1,
        )
    for number, names in members.items():
        settings = saved[names[0]]
        other = next((name for name in names if saved[name] != settings), None)
        if other is not None:
            raise CheckpointError(
                f"{names[0]} and {other} are in one parameter group now, but were in groups with "
                "different settings when the state was saved; use the same groups as then"
            )
        # An engine may step through several optimizers with the same groups: each gets the settings.
        for optimizer in {id(step.optimizer): step.optimizer for step in training.steps}.values():
            _set(optimizer, number, settings, document["class"])


def _set(
    optimizer: torch.optim.Optimizer, number: int, settings: Mapping[str, object], saved_class: str
) -> None:
    group, same = optimizer.param_groups[number], class_of(optimizer) == saved_class
    for key, value in settings.items():
        # Of another class only settings that both know are taken over; ``initial_lr`` is a schedule's, which
        # is no default of any.
        if key in _HOW or not (same or key in group or key == "initial_lr"):
            continue
        new, old = decoded(value, {}), group.get(key)
        if isinstance(old, torch.Tensor):
            # In place: a captured graph, or a schedule, may hold this very tensor.
            old.copy_(torch.as_tensor(new, device=old.device))
        else:
            group[key] = new if same or not isinstance(new, torch.Tensor) else new.item()


def check_saveable(training: LiveTraining) -> None:
    """Raise ConfigError for an optimizer that keeps more than the states of its parameters."""
    stepped = {id(step.tensor) for step in training.steps}
    for optimizer in optimizers_of(training.steps):
        name = type(optimizer).__name__
        for attribute, inner in inner_optimizers(optimizer).items():
            raise ConfigError(
                f"the optimizer {name} wraps another one, a {type(inner).__name__}, in its attribute "
                f"{attribute}, whose state would not be saved: pass the inner one as optimizer and the state "
                "of the outer one in extra, or train with one optimizer"
            )
        for key, value in optimizer.state.items():
            known = isinstance(key, torch.Tensor) and (training.state.owns_optimizer or id(key) in stepped)
            if value and not known:
                raise ConfigError(
                    f"the optimizer {name} has state for a tensor that is in none of its groups, and it "
                    "would be lost: remove it from optimizer.state, or add the tensor to a group"
                )
        if own := own_values(optimizer):
            raise ConfigError(
                f"the optimizer {name} has values of its own in its state_dict() ({', '.join(own)}), which "
                "would be lost: use another optimizer, or save them in extra with a class without them"
            )


def optimizers_of(steps: Sequence[Stepped]) -> list[torch.optim.Optimizer]:
    """The optimizers that step, each once."""
    return list({id(step.optimizer): step.optimizer for step in steps}.values())


# Whether an optimizer can go on with a state that another one kept: only by the same rule.

#: Settings that change the rule, with the values that every class computes with.
_USUAL = {"amsgrad": False, "maximize": False, "bias_correction": True}


def class_of(optimizer: torch.optim.Optimizer) -> str:
    """The full name of its class."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def check_rule(optimizer: torch.optim.Optimizer, document: JsonMapping) -> None:
    """Raise CheckpointError unless ``optimizer`` steps by the rule by which the state was made."""
    saved_class, own = document["class"], class_of(optimizer)
    if saved_class in ("", own) and document.get("rule", rule_of(optimizer)) == rule_of(optimizer):
        return  # others do not say which it was
    lacking = _lacking(optimizer, document)
    if lacking:
        raise CheckpointError(
            f"the state was saved by {saved_class}, {lacking}, and cannot be resumed: resume "
            "with the optimizer that it was saved with, or load the weights alone (zerostart.load of the "
            "checkpoint's folder model/) and begin with a new optimizer"
        )


def _lacking(optimizer: torch.optim.Optimizer, document: JsonMapping) -> str:
    """Return what ``optimizer`` lacks of the saved one's rule, in words; empty where it has all."""
    name = class_of(optimizer)
    settings = [group["settings"] for group in document["groups"]]
    saved, own = document.get("rule"), rule_of(optimizer)  # older states have no rule
    if saved not in (None, own):
        return f"which steps by the rule of {saved}, and {name} by that of {own}"
    for key, usual in _USUAL.items():
        for setting in settings:
            if setting.get(key, usual) != usual and not computes(optimizer, key):
                return f"with {key}={setting[key]}, which {name} does not go by"
        own_values = {group.get(key, usual) for group in optimizer.param_groups} - {usual}
        if own_values and any(key not in setting for setting in settings):
            return f"which knows no {key}, and {name} has {key}={own_values.pop()}"
    return ""
