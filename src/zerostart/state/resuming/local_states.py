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
from zerostart.state.resuming.values import decoded, dtype_of, encoded
from zerostart.upstream.torch.optimizer_values import put_together, taken_apart

#: The first part of their names in a checkpoint.
LOCAL = "local"


def _local(value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def local_states(training: LiveTraining, world: World) -> tuple[list[Shard], JsonObject]:
    """The states that are kept as they are, by ``local/KEY/NAME``, and what the document says; collective.

    Raises ConfigError for a tensor of an unknown class.
    """
    own: JsonObject = {}
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for step in training.steps:
        if is_elementwise(step):
            continue
        name = training.name_of(step.members[0].parameter)
        # Named by the step's first parameter: a step has one state, whichever parameters are in it.
        tensors[name] = {}
        whole = _is_whole(step, training)
        own[name] = {"whole": whole, "share": _share(step, training), "states": {}}
        for key, value in step.state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                kind, parts, context = taken_apart(_local(value), f"the state {key!r} of {name}")
                tensors[name] |= {_key(key, part): tensor for part, tensor in parts.items()}
                own[name]["states"][key] = {
                    "class": kind,
                    "context": encoded(context, key, {}),
                    "global": list(value.shape) if isinstance(value, DTensor) else None,
                    "parts": {n: [spelling(t.dtype, key), list(t.shape)] for n, t in parts.items()},
                }
    # Only the descriptions travel, not the tensors: each rank needs the lengths of all to know where its own
    # part lies in the row that they make together.
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
            lengths = [_lengths(one).get(key, 0) for one in document[name]]
            shards.append(_shard(f"{LOCAL}/{key}/{name}", tensor, lengths, whole, world))
    return shards, document


def _is_whole(step: Stepped, training: LiveTraining) -> bool:
    """Whether every rank has all of a state: of a parameter that is no engine's, nor a DTensor."""
    return not training.state.owns_optimizer and step.is_parameter and not isinstance(step.tensor, DTensor)


def _key(key: str, part: str) -> str:
    return f"{key}.{part}" if part else key


class _Text(str):
    """A text that stands for itself where it is in a tuple that is printed."""

    __slots__ = ()
    __repr__ = str.__str__


def _share(step: Stepped, training: LiveTraining) -> int:
    """A number that is the same where this rank steps the same elements in the same order.

    It is written into states: the text that it is of stays as the first version printed it.
    """
    members = [
        (name, member.at, member.count, member.first, boxes)
        for member in step.members
        for name in [training.name_of(member.parameter)]
        for boxes in [
            tuple(
                _Text(
                    f"Placed(box=Box(origin={one.box.origin!r}, extent={one.box.extent!r}), to={one.to!r}, "
                    f"strides={one.strides!r})"
                )
                for one in training.shards[name].layout.boxes
            )
        ]
    ]
    return zlib.crc32(repr((_local(step.tensor).numel(), members)).encode())


def _lengths(described: JsonMapping) -> dict[str, int]:
    return {
        _key(key, part): prod(shape)
        for key, state in described["states"].items()
        for part, (_, shape) in state["parts"].items()
    }


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
        lengths = [_lengths(one) for one in described]
        for key, state in own["states"].items():
            device = step.tensor.device
            parts = {
                part: torch.zeros(shape, dtype=dtype_of(kind), device=device)
                for part, (kind, shape) in state["parts"].items()
            }
            # Put together of empty parts first: the parts are filled by the read that follows, in the memory
            # that the value has then.
            value = put_together(
                state["class"], parts, decoded(state["context"], {}), _local(step.tensor.detach())
            )
            step.optimizer.state[step.tensor][key] = _distributed(value, state["global"], step.tensor)
            for part, tensor in parts.items():
                named = _key(key, part)
                yield _shard(
                    f"{LOCAL}/{named}/{name}", tensor, [one.get(named, 0) for one in lengths], whole, world
                )


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
