"""States of an optimizer that are not one element for each of their parameter's: factors, blocks, codes.

Nobody here knows how to cut them, so they are kept as each rank has them, and go on where each rank has the
same elements of the same parameters. Where every rank has a parameter whole they are the same on all, are
saved once, and go on with any number of ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zerostart.checkpoint.strict_json import JsonMapping, JsonObject
from zerostart.distributed.world import World
from zerostart.engines import Shard, Stepped
from zerostart.errors import CheckpointError, ConfigError
from zerostart.geometry.layout import replicated
from zerostart.geometry.layout.flat import flat_run
from zerostart.live.training import LiveTraining, is_elementwise
from zerostart.recipe import spelling
from zerostart.state.resuming.values import dtype_of

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
    """Return whether every rank has all of a state: its parameter is no engine's, nor a DTensor."""
    return not training.state.owns_optimizer and step.is_parameter and not isinstance(step.tensor, DTensor)


def _share(step: Stepped, training: LiveTraining) -> int:
    """Return a number that is the same where this rank steps the same elements in the same order."""
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
    """``value`` as a part of a tensor of that ``shape`` which lies as ``like`` does; itself without one."""
    if shape is None or not isinstance(like, DTensor):
        return value
    stride = (
        like.stride() if tuple(shape) == tuple(like.shape) else torch.empty(shape, device="meta").stride()
    )
    return DTensor.from_local(
        value, like.device_mesh, like.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
