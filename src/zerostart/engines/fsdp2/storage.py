"""Allocate the local shards of a model that FSDP2 has wrapped on meta.

``to_empty`` is never called: it would empty non-persistent buffers, untie tied weights, and allocate page by
page.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement

from zerostart.engines.fsdp2.settings import FSDP2Settings
from zerostart.engines.shard import Shard, replace_everywhere
from zerostart.errors import EngineError
from zerostart.geometry.layout import Layout, dimension_shard, replicated
from zerostart.transfer import Arena, page_locked
from zerostart.upstream.torch.tensors import adopt_local_tensors, hide_padding, wrap_local


def arena_of(settings: FSDP2Settings, device: torch.device) -> Arena:
    """Return the arena for shards, on ``device`` or, if offloaded, on the host."""
    if settings.pinned:
        return Arena(torch.device("cpu"), page_locked)
    return Arena(torch.device("cpu") if settings.offloaded else device)


def give_storage(
    model: nn.Module,
    names: Sequence[str],
    arena: Arena,
    rank: int,
    at: Callable[[str, int], Layout],
    chunk: Callable[[str], Sequence[int]],
) -> list[Shard]:
    """Allocate the local tensor of each parameter, sharded or whole.

    ``at`` gives the layout of a parameter on any rank. ``chunk`` gives the shape of its largest shard, to
    which FSDP2 pads every local tensor.
    """
    parameters = dict(model.named_parameters())
    placed: list[tuple[str, Layout, int]] = []
    for name in names:
        layout = at(name, rank)
        # Reserve all sizes first: the arena is one allocation, with a place for each shard.
        placed.append((name, layout, arena.reserve(layout.numel, parameters[name].dtype)))
    new: dict[int, nn.Parameter] = {}
    shards = []
    for name, layout, place in placed:
        old = parameters[name]
        storage = _detach_from_arena(arena.take(place, layout.numel, old.dtype))
        new[id(old)] = _over(old, name, storage.view(tuple(chunk(name))))
        shards.append(Shard(name, layout, storage, functools.partial(at, name)))
    replace_everywhere(model, new)
    # FSDP2 keeps separate local tensors, which are on meta until it looks at the parameters again.
    adopt_local_tensors(model)
    for name, layout, _ in (one for one in placed if parameters[one[0]].dim()):
        # Do this last: FSDP2 must get the padded tensor, and the user must see it without padding.
        hide_padding(new[id(parameters[name])], layout.owned)
    return shards


def _detach_from_arena(part: torch.Tensor) -> torch.Tensor:
    """Return ``part`` of an arena with a storage offset of 0.

    Its storage is a view, which keeps the arena alive. A DTensor shows the offset of its local tensor as its
    own. With an offset other than 0 torch assumes that the DTensor has memory, which ``copy.deepcopy``,
    ``pickle`` and ``torch.save`` then access.
    """
    start = part.storage_offset() * part.element_size()
    own = part.untyped_storage()[start : start + part.nbytes]
    return torch.empty(0, dtype=part.dtype, device=part.device).set_(own)


def _over(old: nn.Parameter, name: str, local: torch.Tensor) -> nn.Parameter:
    """Return a copy of the parameter ``old`` with ``local`` as its memory."""
    data = wrap_local(require_dtensor(old, name), local) if old.dim() else local
    new = nn.Parameter(data, requires_grad=old.requires_grad)
    new.__dict__.update({k: v for k, v in old.__dict__.items() if not k.startswith("_local")})
    return new


def require_dtensor(parameter: nn.Parameter, name: str) -> DTensor:
    """Return the parameter as a DTensor; raise EngineError for other tensors."""
    tensor: torch.Tensor = parameter
    if not isinstance(tensor, DTensor):
        raise EngineError(
            f"fully_shard left {name}, of shape {tuple(tensor.shape)}, unsharded; this is a bug in zerostart"
        )
    return tensor


def sharded_layout(parameter: DTensor, rank: int) -> Layout:
    """Return the layout on ``rank`` of a parameter.

    At most one axis of its mesh shards it; the others replicate it. Raises EngineError for other placements.
    """
    placements, mesh = parameter.placements, parameter.device_mesh
    axes = [(axis, p) for axis, p in enumerate(placements) if isinstance(p, ShardPlacement)]
    if len(axes) > 1 or not all(isinstance(p, (Replicate, ShardPlacement)) for p in placements):
        raise EngineError(
            f"a parameter has the placements {placements}, which this version does not support; shard "
            "it over one dimension of its mesh, and replicate it over the others"
        )
    if not axes:
        return replicated(tuple(parameter.shape))
    ((axis, placement),) = axes
    return dimension_shard(tuple(parameter.shape), placement.dim, _places(mesh)[rank][axis], mesh.shape[axis])


def holders(parameter: DTensor) -> tuple[int, int]:
    """Return this rank's index among the ranks with its shard, and their number."""
    place, count = 0, 1
    mesh = parameter.device_mesh
    for axis, placement in enumerate(parameter.placements):
        if isinstance(placement, Replicate):
            place = place * mesh.shape[axis] + mesh.get_local_rank(axis)
            count *= mesh.shape[axis]
    return place, count


def _places(mesh: DeviceMesh) -> dict[int, tuple[int, ...]]:
    """Return the coordinates of each rank in a mesh, computed once for all parameters."""
    places_of_ranks = _mesh_places.get(mesh)
    if places_of_ranks is None:
        places = itertools.product(*map(range, mesh.mesh.shape))
        places_of_ranks = dict(zip(mesh.mesh.flatten().tolist(), places, strict=True))
        _mesh_places[mesh] = places_of_ranks
    return places_of_ranks


_mesh_places: weakref.WeakKeyDictionary[DeviceMesh, dict[int, tuple[int, ...]]] = weakref.WeakKeyDictionary()


def reshard_units(model: nn.Module) -> None:
    """Replace gathered parameters of ``model`` by the shards that are trained.

    After a forward, the root unit keeps its gathered parameters; below stage 3 every unit does. They are
    different objects from the trained shards, and in the compute dtype.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def current_shards(model: nn.Module) -> dict[str, Shard]:
    """Return the current FSDP2 shards of ``model``, and reshard gathered parameters."""
    reshard_units(model)
    shards = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, DTensor) and not _is_cut(parameter):
            at = functools.partial(sharded_layout, parameter)
            local = parameter.to_local().detach().view(-1)
            shards[name] = Shard(name, at(dist.get_rank()), local, at, holders(parameter))
    return shards


def _is_cut(parameter: DTensor) -> bool:
    """Return True if ``parameter`` is cut by expert or tensor parallelism.

    Only the record of its load has the layout.
    """
    axes = {*(parameter.device_mesh.mesh_dim_names or ())}
    return "shard" in axes and bool(axes & {"expert", "tensor"})
