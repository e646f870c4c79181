"""What an optimizer keeps for a model's parameters, taken out and put in: as logical tensors and numbers.

Engines keep it in different places (flat partitions, sub-groups, the parameters themselves), under the same
keys. A tensor of a parameter's shape lies as the parameter's own share does, or as the run of it that the
rank steps; anything with a single element is a number of the parameter.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zerostart.checkpoint.strict_json import JsonMapping, JsonObject
from zerostart.distributed.world import World
from zerostart.engines import Shard, Stepped
from zerostart.errors import CheckpointError, ConfigError
from zerostart.geometry.layout import replicated
from zerostart.geometry.layout.layout import flat_run
from zerostart.live.training import LiveTraining, StateTensor, is_elementwise, is_number, member_shard
from zerostart.recipe import spelling
from zerostart.state.resuming.values import decoded, dtype_of, encoded
from zerostart.upstream.torch.stepped import computes, inner_optimizers, own_values, rule_of

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
                    yield StateTensor(name, key, member_shard(member, training.shards[name], values))


def _numbers(document: JsonMapping) -> dict[str, dict[str, object]]:
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
    kinds = set(type(optimizer).__mro__).difference(torch.optim.Optimizer.__mro__)
    return any(kind.__module__.startswith("torch.") for kind in kinds)


def _plain(value: object) -> Any:
    found = decoded(value, {})
    return found.item() if isinstance(found, torch.Tensor) else found


def _room(
    key: str, names: Sequence[str], held: object, step: Stepped, stored: Mapping[str, str]
) -> torch.Tensor:
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
    name = class_of(optimizer)
    settings = [group["settings"] for group in document["groups"]]
    saved, own = document.get("rule"), rule_of(optimizer)  # older states have no rule
    decays = any(decoded(setting.get("weight_decay"), {}) for setting in settings)
    if saved not in (None, own) and (decays or {saved, own} != {"Adam", "AdamW"}):
        return f"which steps by the rule of {saved}, and {name} by that of {own}"
    for key, usual in _USUAL.items():
        for setting in settings:
            if setting.get(key, usual) != usual and not computes(optimizer, key):
                return f"with {key}={setting[key]}, which {name} does not go by"
        own_values = {group.get(key, usual) for group in optimizer.param_groups} - {usual}
        if own_values and any(key not in setting for setting in settings):
            return f"which knows no {key}, and {name} has {key}={own_values.pop()}"
    return ""


# States that are not one element for each of their parameter's (factors, blocks, codes). They are kept as
# each rank has them, and go on where each rank has the same elements of the same parameters. States of
# parameters that every rank has whole are saved once, and go on with any number of ranks.

#: The first part of their names in a checkpoint.
LOCAL = "local"


def _local(value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def local_states(training: LiveTraining, world: World) -> tuple[list[Shard], JsonObject]:
    """Return the states that are kept as they are, by ``local/KEY/NAME``, and their document; collective.

    Raises ConfigError for a tensor of an unknown class.
    """
    own: JsonObject = {}
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for step in training.steps:
        if is_elementwise(step):
            continue
        # Named by the step's first parameter: a step has one state, whichever parameters are in it.
        name = training.name_of(step.members[0].parameter)
        tensors[name] = {}
        own[name] = {"whole": _is_whole(step, training), "share": _share(step, training), "states": {}}
        for key, value in step.state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                tensors[name][key] = local = _local(value)
                if hasattr(local, "__tensor_flatten__"):
                    raise ConfigError(
                        f"the state {key!r} of {name} is a {type(local).__name__}, a tensor of a class of "
                        "its own, and cannot be saved; use another optimizer, or save its state_dict() by "
                        "yourself"
                    )
                own[name]["states"][key] = {
                    "global": list(value.shape) if isinstance(value, DTensor) else None,
                    "dtype": spelling(local.dtype, key),
                    "shape": list(local.shape),
                }
    # Each rank needs the lengths of all to know where its own part lies in the row that they make together.
    every = world.all_gather_object(own, "comparing states of the optimizer that each rank has of its own")
    shards, document = [], {}
    for name in own:
        described = [one[name] for one in every if name in one]
        if len(described) < world.size or len({one["whole"] for one in described}) > 1:
            raise ConfigError(
                f"the optimizer's states of {name} differ between ranks and cannot be saved; use the "
                "same optimizer and parameters on every rank"
            )
        whole = own[name]["whole"]
        document[name] = described[:1] if whole else described
        for key, tensor in tensors[name].items():
            lengths = [_length(one, key) for one in document[name]]
            shards.append(_shard(f"{LOCAL}/{key}/{name}", tensor, lengths, whole, world))
    return shards, document


def _is_whole(step: Stepped, training: LiveTraining) -> bool:
    return not training.state.owns_optimizer and step.is_parameter and not isinstance(step.tensor, DTensor)


def _share(step: Stepped, training: LiveTraining) -> int:
    members = []
    for member in step.members:
        name = training.name_of(member.parameter)
        boxes = [(b.box.origin, b.box.extent, b.to, b.strides) for b in training.shards[name].layout.boxes]
        members.append((name, member.at, member.count, member.first, boxes))
    return zlib.crc32(repr((_local(step.tensor).numel(), members)).encode())


def _length(described: JsonMapping, key: str) -> int:
    return prod(described["states"][key]["shape"]) if key in described["states"] else 0


def _shard(name: str, tensor: torch.Tensor, lengths: Sequence[int], whole: bool, world: World) -> Shard:
    """A rank's part of the row of all ranks' elements."""
    storage = tensor.detach().contiguous().view(-1)
    if whole:
        layout = replicated((storage.numel(),))
        return Shard(name, layout, storage, lambda _: layout, (world.rank, world.size))
    # Not the whole of a parameter but all ranks' parts one after the other, by rank: that is the order in
    # which they are read again.
    first = sum(lengths[: world.rank])
    run = flat_run((sum(lengths),), first, first + lengths[world.rank])
    return Shard(name, run, storage, lambda _: run)


def check_local(training: LiveTraining, document: JsonMapping, world: World) -> None:
    """Raise CheckpointError unless the states that were kept as they were can go on here as they are."""
    by_name = {training.name_of(step.members[0].parameter): step for step in training.steps}
    for name, described in document.get(LOCAL, {}).items():
        step = by_name.get(name)
        same = step is not None and described[0]["whole"] and _is_whole(step, training)
        if step is not None and not described[0]["whole"] and len(described) == world.size:
            same = described[world.rank]["share"] == _share(step, training)
        if not same:
            ranks = "every rank" if described[0]["whole"] else f"{len(described)} ranks"
            raise CheckpointError(
                f"the optimizer's states {', '.join(described[0]['states'])} of {name} do not have the "
                f"parameter's shape, and were saved by {ranks}, each with its own share: they can "
                f"be resumed only where ranks have the same shares ({document['class']}); resume on "
                "the same number of ranks with the same settings, or load the weights alone "
                "(zerostart.load of the checkpoint's folder model/) and begin with a new optimizer"
            )


def restored_local(training: LiveTraining, document: JsonMapping, world: World) -> Iterator[Shard]:
    """Make the states that were kept as they were; gives the tensors that are to be filled."""
    for step in training.steps:
        name = training.name_of(step.members[0].parameter)
        described = document.get(LOCAL, {}).get(name)
        if described is None:
            continue
        whole = described[0]["whole"]
        own = described[0 if whole else world.rank]
        for key, state in own["states"].items():
            tensor = torch.zeros(state["shape"], dtype=dtype_of(state["dtype"]), device=step.tensor.device)
            step.optimizer.state[step.tensor][key] = _distributed(tensor, state["global"], step.tensor)
            lengths = [_length(one, key) for one in described]
            yield _shard(f"{LOCAL}/{key}/{name}", tensor, lengths, whole, world)


def _distributed(value: torch.Tensor, shape: Any, like: torch.Tensor) -> torch.Tensor:
    if shape is None or not isinstance(like, DTensor):
        return value
    stride = (
        like.stride() if tuple(shape) == tuple(like.shape) else torch.empty(shape, device="meta").stride()
    )
    return DTensor.from_local(
        value, like.device_mesh, like.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
