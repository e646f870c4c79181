"""Storage for what ``fully_shard`` has sharded on meta, and what lies where in it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement

from zerostart.engines.shard import Shard, replace_everywhere
from zerostart.errors import EngineError
from zerostart.layout import Layout, dimension_shard
from zerostart.transfer import Arena
from zerostart.upstream.torch import adopt_local_tensors, hide_padding, over

__all__ = ["give_storage", "sharded", "sharded_layout"]


def give_storage(
    model: nn.Module,
    names: Sequence[str],
    arena: Arena,
    rank: int,
    at: Callable[[str, int], Layout],
    chunk: Callable[[str], Sequence[int]],
) -> list[Shard]:
    """Put the local tensor of each parameter over storage of its own.

    ``at`` gives the layout of a parameter on any rank, ``chunk`` the shape of a full chunk of it, for which
    FSDP2 keeps room.
    """
    parameters = dict(model.named_parameters())
    placed: list[tuple[str, Layout, int]] = []
    for name in names:
        layout = at(name, rank)
        placed.append((name, layout, arena.reserve(layout.numel, parameters[name].dtype)))
    new: dict[int, nn.Parameter] = {}
    shards = []
    for name, layout, place in placed:
        old = parameters[name]
        storage = arena.take(place, layout.numel, old.dtype)
        new[id(old)] = _over(old, name, storage.view(tuple(chunk(name))))
        shards.append(Shard(name, layout, storage, functools.partial(at, name)))
    replace_everywhere(model, new)
    adopt_local_tensors(model)
    for name, layout, _ in placed:
        hide_padding(new[id(parameters[name])], layout.owned)
    return shards


def _over(old: nn.Parameter, name: str, local: torch.Tensor) -> nn.Parameter:
    """``old``, a DTensor on meta, with another local tensor."""
    new = nn.Parameter(over(sharded(old, name), local), requires_grad=old.requires_grad)
    new.__dict__.update({k: v for k, v in old.__dict__.items() if not k.startswith("_local")})
    return new


def sharded(parameter: nn.Parameter, name: str) -> DTensor:
    """The parameter's data, a DTensor. Raises EngineError if it is none."""
    data = parameter.data
    if not isinstance(data, DTensor):
        raise EngineError(f"fully_shard left {name}, of shape {tuple(data.shape)}, unsharded")
    return data


def sharded_layout(parameter: DTensor, rank: int) -> Layout:
    """What rank ``rank`` holds of a parameter that ``fully_shard`` alone has sharded.

    Raises EngineError for placements that are not known.
    """
    placements = parameter.placements
    last = placements[-1]
    if not isinstance(last, ShardPlacement) or not all(isinstance(p, Replicate) for p in placements[:-1]):
        raise EngineError(f"a parameter has the placements {placements}, which this version does not know")
    mesh = parameter.device_mesh
    return dimension_shard(tuple(parameter.shape), last.dim, _shares(mesh)[rank], mesh.shape[-1])


def _shares(mesh: DeviceMesh) -> dict[int, int]:
    """The place of each rank along the last dimension of a mesh; found out once for all parameters."""
    found = _known.get(mesh)
    if found is None:
        ranks = mesh.mesh
        found = {rank: n % ranks.shape[-1] for n, rank in enumerate(ranks.flatten().tolist())}
        _known[mesh] = found
    return found


_known: weakref.WeakKeyDictionary[DeviceMesh, dict[int, int]] = weakref.WeakKeyDictionary()
