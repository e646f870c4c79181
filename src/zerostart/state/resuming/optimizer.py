"""Save and restore the state of an optimizer as logical tensors and numbers.

Engines keep it in different places (flat partitions, sub-groups, the parameters themselves), under the same
keys. A tensor of a parameter's shape has the layout of the parameter's share, or of the run of it that the
rank steps. A single element is a number of the parameter.
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
from zerostart.engines import Shard, SteppedTensor
from zerostart.errors import CheckpointError, ConfigError
from zerostart.geometry.layout import replicated
from zerostart.geometry.layout.layout import flat_run
from zerostart.live.training import LiveTraining, StateTensor, is_elementwise, is_number, member_shard
from zerostart.recipe import spelling
from zerostart.state.resuming.values import decode, dtype_of, encode
from zerostart.upstream.torch.optimizer_steps import computes, inner_optimizers, own_values, rule_of
from zerostart.upstream.torch.tensors import bypass_interception

logger = logging.getLogger("zerostart")

#: Group settings that describe the grouping or the implementation, not the result.
_OWN = ("params", "param_names", "name", "moe", "_ds_source_param_group_id")
_HOW = ("foreach", "fused", "capturable", "differentiable")


def describe_optimizer(training: LiveTraining) -> dict[str, object]:
    """Return the optimizer's groups and numbers as JSON.

    Raises ConfigError for other values.
    """
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
                # Most parameters have the same number (their step): write it once, with their names.
                written = encode(value, key, {})
                numbers.setdefault(key, {}).setdefault(repr(written), (written, []))[1].extend(names)
    base = steps[0].optimizer
    return {
        "class": class_name(base),
        "rule": rule_of(base),
        "numbers": {key: list(values.values()) for key, values in numbers.items()},
        "groups": [
            {"settings": _encode_settings(base.param_groups[number], number), "parameters": names}
            for number, names in groups.items()
        ],
    }


def _encode_settings(group: Mapping[str, object], number: int) -> dict[str, object]:
    tensors: dict[str, torch.Tensor] = {}
    settings = {
        key: encode(value, f"{key} of parameter group {number}", tensors)
        for key, value in group.items()
        if key not in _OWN
    }
    if tensors:
        raise ConfigError(
            f"{next(iter(tensors))} is a tensor of several elements, but a setting of the "
            "optimizer must be one number"
        )
    return settings


def create_moments(
    training: LiveTraining, document: Mapping[str, object], stored: Mapping[str, str]
) -> Iterator[StateTensor]:
    """Create the saved optimizer states, and yield the tensors to fill.

    ``stored`` has the dtypes of the saved tensors, as safetensors spells them, by ``optimizer/KEY/NAME``.
    Parameters without a saved state lose theirs, and states with other keys are deleted. Raises
    CheckpointError if parameters that are stepped together were saved with different numbers.
    """
    # Collect the keys of the state by parameter. A stepped tensor holds one parameter or runs of many.
    keys: dict[str, list[str]] = {}
    for path in stored:
        kind, _, rest = path.partition("/")
        if kind == "optimizer":
            key, _, name = rest.partition("/")
            keys.setdefault(name, []).append(key)
    numbers = _numbers_by_name(document)
    for step in training.steps:
        names = [training.name_of(member.parameter) for member in step.members]
        # Elements of parameters without a saved state stay zero.
        having = [name for name in names if name in keys or name in numbers]
        if not having:
            # As if never stepped: the optimizer creates the state at its next step.
            step.optimizer.state.pop(step.tensor, None)
            continue
        state = step.optimizer.state[step.tensor]
        # A dict, since its order becomes the order of the state's keys, the same on all ranks.
        counted = dict.fromkeys(key for name in having for key in numbers.get(name, {}))
        filled = dict.fromkeys(key for name in having for key in keys.get(name, ()))
        for key in state.keys() - (counted | filled):
            del state[key]
        for key in counted:
            state[key] = _restore_number(key, having, numbers, step, document)
        for key in filled:
            # One tensor for all members of the step; each member is read into its part.
            state[key] = values = _allocate(key, having, state.get(key), step, stored)
            for member, name in zip(step.members, names, strict=True):
                if f"optimizer/{key}/{name}" in stored:
                    yield StateTensor(name, key, member_shard(member, training.shards[name], values))


def _numbers_by_name(document: JsonMapping) -> dict[str, dict[str, object]]:
    by_name: dict[str, dict[str, object]] = {}
    for key, values in document.get("numbers", {}).items():
        for value, names in values:
            for name in names:
                by_name.setdefault(name, {})[key] = value
    return by_name


def _restore_number(
    key: str,
    names: Sequence[str],
    numbers: Mapping[str, Mapping[str, object]],
    step: SteppedTensor,
    document: JsonMapping,
) -> object:
    """Return the number of a stepped tensor, in the form that its optimizer uses."""
    saved = {name: numbers[name][key] for name in names if key in numbers.get(name, {})}
    first, value = next(iter(saved.items()))
    plain = _plain_number(value)
    for name, other in saved.items():
        if _plain_number(other) != plain:
            raise CheckpointError(
                f"{first} was saved with {key}={plain}, but {name} with {_plain_number(other)}, and this "
                "engine updates them together: resume with an engine that updates each by itself "
                "(engine='fsdp2')"
            )
    # torch's optimizers store numbers (``step``) as tensors, others as numbers.
    number = decode(value, {})
    if class_name(step.optimizer) != document["class"]:
        if _is_torchs(step.optimizer):
            number = torch.tensor(float(plain), dtype=torch.float32, device="cpu")
        else:
            number = int(plain) if isinstance(plain, float) and plain.is_integer() else plain
    group = step.optimizer.param_groups[step.group]
    # A fused or capturable step reads its number on the device.
    if isinstance(number, torch.Tensor) and (group.get("capturable") or group.get("fused")):
        number = number.to(step.tensor.device)
    return number


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    kinds = set(type(optimizer).__mro__).difference(torch.optim.Optimizer.__mro__)
    return any(kind.__module__.startswith("torch.") for kind in kinds)


def _plain_number(value: object) -> Any:
    number = decode(value, {})
    return number.item() if isinstance(number, torch.Tensor) else number


def _allocate(
    key: str, names: Sequence[str], current: object, step: SteppedTensor, stored: Mapping[str, str]
) -> torch.Tensor:
    path = next(f"optimizer/{key}/{name}" for name in names if f"optimizer/{key}/{name}" in stored)
    saved = dtype_of(stored[path])
    name = path.split("/", 2)[2]
    # The saved optimizer stepped the master, if there was one.
    master_dtype = stored.get(f"master/{name}") or stored[f"model/{name}"]
    dtype = saved
    if saved.is_floating_point and master_dtype != spelling(step.tensor.dtype):
        dtype = step.tensor.dtype  # as torch's optimizers load a state of another precision
    with torch.no_grad(), bypass_interception():
        if (
            isinstance(current, torch.Tensor)
            and current.dtype == dtype
            and current.shape == step.tensor.shape
        ):
            return current.zero_()
        return torch.zeros_like(step.tensor.detach(), dtype=dtype)


def restore_groups(training: LiveTraining, document: JsonMapping) -> None:
    """Give each group the saved settings of its parameters.

    The groups may be composed differently. Raises CheckpointError for parameters that were not optimized in
    the saved run, and for a group whose parameters had different settings.
    """
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
    absent = sorted(saved.keys() - {name for names in members.values() for name in names})
    if absent:
        logger.warning(
            "%s and %d more were trained by the saved optimizer, but are not in this optimizer",
            absent[0],
            len(absent) - 1,
        )
    for number, names in members.items():
        settings = saved[names[0]]
        different = next((name for name in names if saved[name] != settings), None)
        if different is not None:
            raise CheckpointError(
                f"{names[0]} and {different} are in one parameter group now, but were in groups with "
                "different settings when the state was saved; use the saved groups"
            )
        # An engine may use several optimizers with the same groups.
        for optimizer in {id(step.optimizer): step.optimizer for step in training.steps}.values():
            _apply_settings(optimizer, number, settings, document["class"])


def _apply_settings(
    optimizer: torch.optim.Optimizer, number: int, settings: Mapping[str, object], saved_class: str
) -> None:
    group, same = optimizer.param_groups[number], class_name(optimizer) == saved_class
    for key, value in settings.items():
        # Another class takes only settings that it knows, and ``initial_lr``, which belongs to a schedule.
        if key in _HOW or not (same or key in group or key == "initial_lr"):
            continue
        new, old = decode(value, {}), group.get(key)
        if isinstance(old, torch.Tensor):
            # In place, since a captured graph or a schedule may hold this tensor.
            old.copy_(torch.as_tensor(new, device=old.device))
        else:
            group[key] = new if same or not isinstance(new, torch.Tensor) else new.item()


def check_saveable(training: LiveTraining) -> None:
    """Raise ConfigError for an optimizer with more than states of its parameters."""
    known = {id(step.tensor) for step in training.steps}
    for optimizer in list_optimizers(training.steps):
        name = type(optimizer).__name__
        for attribute, inner in inner_optimizers(optimizer).items():
            raise ConfigError(
                f"the optimizer {name} wraps another one, a {type(inner).__name__}, in its attribute "
                f"{attribute}, whose state would not be saved: pass the inner one as optimizer and the state "
                "of the outer one in extra, or train with one optimizer"
            )
        for key, value in optimizer.state.items():
            is_known = isinstance(key, torch.Tensor) and (training.state.owns_optimizer or id(key) in known)
            if value and not is_known:
                raise ConfigError(
                    f"the optimizer {name} has state for a tensor that is in none of its groups, and it "
                    "would be lost: remove it from optimizer.state, or add the tensor to a group"
                )
        if own := own_values(optimizer):
            raise ConfigError(
                f"the optimizer {name} has additional values in its state_dict() ({', '.join(own)}), which "
                "would be lost: use another optimizer, or save them in extra with a class without them"
            )


def list_optimizers(steps: Sequence[SteppedTensor]) -> list[torch.optim.Optimizer]:
    """Return the distinct optimizers of the steps."""
    return list({id(step.optimizer): step.optimizer for step in steps}.values())


# An optimizer can continue another one's state only if both use the same update rule.

#: Settings that change the rule, with the defaults that every class supports.
_DEFAULTS = {"amsgrad": False, "maximize": False, "bias_correction": True}


def class_name(optimizer: torch.optim.Optimizer) -> str:
    """Return the full name of an optimizer's class."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def check_rule(optimizer: torch.optim.Optimizer, document: JsonMapping) -> None:
    """Raise CheckpointError unless ``optimizer`` uses the update rule of the saved one."""
    saved_class, own = document["class"], class_name(optimizer)
    if saved_class in ("", own) and document.get("rule", rule_of(optimizer)) == rule_of(optimizer):
        return  # other libraries do not record the class
    if lacking := _find_conflict(optimizer, document):
        raise CheckpointError(
            f"the state was saved by {saved_class}, {lacking}, and cannot be resumed: resume "
            "with the saved optimizer, or load only the weights (zerostart.load of the "
            "checkpoint's folder model/) and start with a new optimizer"
        )


def _find_conflict(optimizer: torch.optim.Optimizer, document: JsonMapping) -> str:
    name = class_name(optimizer)
    settings = [group["settings"] for group in document["groups"]]
    saved, own = document.get("rule"), rule_of(optimizer)  # older states have none
    decays = any(decode(setting.get("weight_decay"), {}) for setting in settings)
    if saved not in (None, own) and (decays or {saved, own} != {"Adam", "AdamW"}):
        return f"which uses the update rule of {saved}, and {name} uses that of {own}"
    for key, usual in _DEFAULTS.items():
        for setting in settings:
            if setting.get(key, usual) != usual and not computes(optimizer, key):
                return f"with {key}={setting[key]}, which {name} does not support"
        own_values = {group.get(key, usual) for group in optimizer.param_groups} - {usual}
        if own_values and any(key not in setting for setting in settings):
            return f"which has no {key}, and {name} has {key}={own_values.pop()}"
    return ""


# Local states are not elementwise (factors, blocks, codes). They are saved as each rank holds them, and can
# be resumed if each rank holds the same elements of the same parameters. States of parameters that every rank
# holds whole are saved once, and can be resumed on any number of ranks.

#: First part of the names of local states in a checkpoint.
LOCAL = "local"


def _local_part(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def collect_local_states(training: LiveTraining, world: World) -> tuple[list[Shard], JsonObject]:
    """Return the local states, by ``local/KEY/NAME``, and their document; collective.

    Raises ConfigError for a tensor of an unknown class.
    """
    own: JsonObject = {}
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for step in training.steps:
        if is_elementwise(step):
            continue
        # A step has one state, which is named by its first parameter.
        name = training.name_of(step.members[0].parameter)
        tensors[name] = {}
        own[name] = {
            "whole": _is_whole(step, training),
            "share": _share_checksum(step, training),
            "states": {},
        }
        for key, value in step.state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                tensors[name][key] = local = _local_part(value)
                if hasattr(local, "__tensor_flatten__"):
                    raise ConfigError(
                        f"the state {key!r} of {name} is a {type(local).__name__}, a tensor subclass "
                        "that cannot be saved; use another optimizer, or save its state_dict() yourself"
                    )
                own[name]["states"][key] = {
                    "global": list(value.shape) if isinstance(value, DTensor) else None,
                    "dtype": spelling(local.dtype, key),
                    "shape": list(local.shape),
                }
    # Each rank needs all lengths to find the offset of its part.
    every = world.all_gather_object(own, "comparing the local states of the optimizer")
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
            lengths = [_count_elements(one, key) for one in document[name]]
            shards.append(_make_shard(f"{LOCAL}/{key}/{name}", tensor, lengths, whole, world))
    return shards, document


def _is_whole(step: SteppedTensor, training: LiveTraining) -> bool:
    return not training.state.owns_optimizer and step.is_parameter and not isinstance(step.tensor, DTensor)


def _share_checksum(step: SteppedTensor, training: LiveTraining) -> int:
    members = []
    for member in step.members:
        name = training.name_of(member.parameter)
        boxes = [(b.box.origin, b.box.extent, b.to, b.strides) for b in training.shards[name].layout.boxes]
        members.append((name, member.at, member.count, member.first, boxes))
    return zlib.crc32(repr((_local_part(step.tensor).numel(), members)).encode())


def _count_elements(described: JsonMapping, key: str) -> int:
    return prod(described["states"][key]["shape"]) if key in described["states"] else 0


def _make_shard(name: str, tensor: torch.Tensor, lengths: Sequence[int], whole: bool, world: World) -> Shard:
    """Return a rank's part of the concatenated elements of all ranks."""
    storage = tensor.detach().contiguous().view(-1)
    if whole:
        layout = replicated((storage.numel(),))
        return Shard(name, layout, storage, lambda _: layout, (world.rank, world.size))
    first = sum(lengths[: world.rank])
    run = flat_run((sum(lengths),), first, first + lengths[world.rank])
    return Shard(name, run, storage, lambda _: run)


def check_local(training: LiveTraining, document: JsonMapping, world: World) -> None:
    """Raise CheckpointError unless the saved local states fit this rank's shares."""
    by_name = {training.name_of(step.members[0].parameter): step for step in training.steps}
    for name, described in document.get(LOCAL, {}).items():
        step = by_name.get(name)
        same = step is not None and described[0]["whole"] and _is_whole(step, training)
        if step is not None and not described[0]["whole"] and len(described) == world.size:
            same = described[world.rank]["share"] == _share_checksum(step, training)
        if not same:
            ranks = "every rank" if described[0]["whole"] else f"{len(described)} ranks"
            raise CheckpointError(
                f"the optimizer's states {', '.join(described[0]['states'])} of {name} do not have the "
                f"parameter's shape, and were saved by {ranks}, each with its own share: they can "
                f"be resumed only if ranks have the same shares ({document['class']}); resume on "
                "the same number of ranks with the same settings, or load only the weights "
                "(zerostart.load of the checkpoint's folder model/) and start with a new optimizer"
            )


def create_local_states(training: LiveTraining, document: JsonMapping, world: World) -> Iterator[Shard]:
    """Create the saved local states, and yield the tensors to fill."""
    for step in training.steps:
        name = training.name_of(step.members[0].parameter)
        described = document.get(LOCAL, {}).get(name)
        if described is None:
            continue
        whole = described[0]["whole"]
        own = described[0 if whole else world.rank]
        for key, state in own["states"].items():
            tensor = torch.zeros(state["shape"], dtype=dtype_of(state["dtype"]), device=step.tensor.device)
            step.optimizer.state[step.tensor][key] = _make_distributed(tensor, state["global"], step.tensor)
            lengths = [_count_elements(one, key) for one in described]
            yield _make_shard(f"{LOCAL}/{key}/{name}", tensor, lengths, whole, world)


def _make_distributed(value: torch.Tensor, shape: Any, like: torch.Tensor) -> torch.Tensor:
    if shape is None or not isinstance(like, DTensor):
        return value
    stride = (
        like.stride() if tuple(shape) == tuple(like.shape) else torch.empty(shape, device="meta").stride()
    )
    return DTensor.from_local(
        value, like.device_mesh, like.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
