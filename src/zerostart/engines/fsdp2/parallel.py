"""Make FSDP2 shards: DTensors over the owners of each section of a mesh.

Experts are separate units. Their gradients are sums over the batches of all ranks, since tokens come from
everywhere, but they have fewer owners: so the sum is divided by the number of batches, and not of owners.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor.placement_types import _StridedShard

from zerostart.distributed.world import World, default_device
from zerostart.engines.engine import ShardMaker
from zerostart.engines.exchange import exchange_tokens, expert_modules
from zerostart.engines.flat_buffers import held_layouts
from zerostart.engines.fsdp2.settings import FSDP2Settings, MeshShares
from zerostart.engines.fsdp2.storage import arena_of, give_storage, reshard_units
from zerostart.engines.fsdp2.units import find_scalars, list_units, shard_units
from zerostart.engines.parallelism import share_random_states
from zerostart.engines.shard import Shard, loaded_names, replace_everywhere
from zerostart.engines.training import EngineConfig
from zerostart.errors import EngineError
from zerostart.geometry import row_major_strides
from zerostart.geometry.layout import Layout, Parallelism, Ranges, ShardSpec
from zerostart.upstream.transformers.distributed import require_styles, run_in_style


class FSDP2Shards(ShardMaker):
    """Makes FSDP2 shards over the owners of each section of a mesh.

    See ``FSDP2Settings.check_mesh``. Parameters that the model keeps in another dtype are separate units,
    which the policy does not cast.
    """

    def __init__(self, world: World, settings: FSDP2Settings, parallelism: Parallelism) -> None:
        if parallelism.mesh.tensor_parallel > 1:
            require_styles()
        self._settings = settings
        self._parallelism = parallelism
        self._rank = world.rank
        self.device = default_device()
        mesh, replicas, kind = parallelism.mesh, settings.replicate, self.device.type
        if settings.mesh is not None:
            self._dense = settings.mesh
            self.device = torch.device("cpu") if settings.mesh.device_type == "cpu" else self.device
            return
        with world.collectives("making the device meshes"):
            if mesh.parallel:
                self._dense, self._tensors = self._meshes(mesh.tensor_parallel, "tensor")
                self._owners, self._experts = self._meshes(mesh.expert_parallel, "expert")
            elif replicas > 1:
                sizes = (replicas, world.size // replicas)
                self._dense = init_device_mesh(kind, sizes, mesh_dim_names=("replicate", "shard"))
            else:
                self._dense = init_device_mesh(kind, (world.size,))

    def _meshes(self, size: int, axis: str) -> tuple[DeviceMesh, DeviceMesh]:
        # The axis innermost: its ranks are neighbours, which exchange in every layer.
        replicas = self._settings.replicate
        sizes = (replicas, self._parallelism.mesh.world_size // (replicas * size), size)
        whole = init_device_mesh(self.device.type, sizes, mesh_dim_names=("replicate", "shard", axis))
        return whole["shard"] if replicas == 1 else whole["replicate", "shard"], whole[axis]

    def shard(self, model: nn.Module, names: Sequence[str]) -> list[Shard]:
        """Cut and wrap the experts, the model's blocks and its root; allocate local shards."""
        settings, whole = self._settings, dict(model.named_parameters())
        # Shapes before the cuts: all layouts refer to whole tensors.
        shapes = {name: tuple(parameter.shape) for name, parameter in whole.items()}
        shares = MeshShares.of_parameters(settings, self._parallelism, whole)
        if self._parallelism.mesh.tensor_parallel > 1:
            cut_tensors(model, self._parallelism, self._tensors)
            share_random_states(model, self._tensors.get_group())
        experts = expert_modules(model, self._parallelism)
        for module, own in experts.items():
            self._cut_experts(module, own)
        # After the cuts, by identity: ``fully_shard`` asks with the present parameter.
        dims: dict[int, int] = {}
        for name, parameter in model.named_parameters():
            if parameter.dim():
                dims[id(parameter)] = shares.dimension(name, *shares.section(name, shapes[name], self._rank))
        options = {
            **settings.options(),
            "ignored_params": find_scalars(model),
            "shard_placement_fn": lambda parameter: ShardPlacement(dims[id(parameter)]),
        }
        for module in experts:
            # Experts first: their owners are other ranks, and the blocks skip sharded modules.
            self._wrap_experts(module, list_units(module, ())[-1].options(options))
        shard_units(model, settings.wrap, self._dense, options)
        return give_storage(
            model,
            names,
            arena_of(settings, self.device),
            self._rank,
            lambda name, rank: shares.layout(name, shapes[name], rank),
            lambda name: shares.chunk(name, shapes[name], self._rank),
        )

    def _cut_experts(self, module: nn.Module, names: Mapping[str, str]) -> None:
        """Replace experts by this rank's, and let them run tokens of all ranks."""
        counts: list[int] = []
        for leaf, name in names.items():
            old = module._parameters[leaf]
            assert old is not None, "a cut names a parameter that is there"
            sections = self._parallelism.expert_sections(name)
            counts = [section.shape[0] for section in sections]
            local = torch.empty(
                sections[self._experts.get_local_rank()].shape, dtype=old.dtype, device="meta"
            )
            module._parameters[leaf] = make_distributed(old, local, self._experts, [ShardPlacement(0)])
        tensor_group = self._tensors.get_group() if self._parallelism.mesh.tensor_parallel > 1 else None
        exchange_tokens(module, self._experts.get_group(), counts, tensor_group=tensor_group)

    def _wrap_experts(self, module: nn.Module, options: EngineConfig) -> None:
        """Shard one experts module over its owners."""
        policy, alone = options.get("mp_policy"), self._owners.shape[-1] == 1
        if alone and policy is not None and torch.float16 in (policy.reduce_dtype, policy.param_dtype):
            # In half precision FSDP2 divides in two steps, before and after the reduction. With one owner it
            # divides by the whole factor in between, too: use float32, where it divides once.
            options = {**options, "mp_policy": replace(policy, reduce_dtype=torch.float32)}
        fully_shard(module, mesh=self._owners, **options)
        unit: Any = module
        # Divide by all ranks, whose tokens have all come to these experts.
        unit.set_gradient_divide_factor(float(self._parallelism.mesh.world_size))
        # As a sum that is divided afterwards: gloo has no reduction with a factor, and NCCL's gives zeros in
        # bfloat16 (pytorch #190745; read there, not run here). One owner has nothing to reduce, and FSDP2
        # divides anyway.
        unit.set_force_sum_reduction_for_comms(not alone)


def adopt_expert(factor: nn.Parameter, like: DTensor, ranges: Ranges, shape: tuple[int, ...]) -> nn.Parameter:
    """Return ``factor``, an adapter of this rank's experts, as a DTensor.

    Its mesh is that of their weight ``like``. All ranks with these experts hold it whole, since adapters are
    small. No FSDP2 unit gathers it or reduces its gradient: the caller averages that.
    """
    mesh, placement = like.device_mesh, _placement(ShardSpec(ranges.dim, len(ranges.ranks[0])), len(shape))
    axes = mesh.mesh_dim_names or ()
    owners = [mesh.get_group(axis) for axis in axes if axis != "expert"]
    with torch.no_grad():
        for group in owners:
            dist.broadcast(factor, group=group, group_src=0)
    placements = [placement if axis == "expert" else Replicate() for axis in axes]
    stride = row_major_strides(shape)
    data = DTensor.from_local(
        factor.data, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    return nn.Parameter(data, requires_grad=factor.requires_grad)


def parallel_shards(
    model: nn.Module, settings: FSDP2Settings, parallelism: Parallelism, rank: int
) -> dict[str, Shard]:
    """Return the current shards of ``model``, and reshard gathered parameters."""
    # Gathered parameters have no shard until they are resharded.
    reshard_units(model)
    names = loaded_names(model)
    # A tied parameter has the layout of its first name.
    sharded = {
        alias: (names[alias], parameter)
        for alias, parameter in model.named_parameters(remove_duplicate=False)
        if isinstance(parameter, DTensor)
    }
    has_placements = settings.shard_placement_fn is not None
    dims = {name: dim for name, p in sharded.values() if (dim := _dimension(p)) is not None}
    shares = MeshShares.of(settings, parallelism, dims if has_placements else None)
    shards = {}
    for alias, (name, parameter) in sharded.items():
        at: Callable[[int], Layout] = functools.partial(shares.layout, name, tuple(parameter.shape))
        replica = shares.holders(name, rank)
        if _dimension(parameter) is None:
            at, replica = held_layouts(parallelism, name), parallelism.owners(name, rank)
        local = parameter.to_local().detach().view(-1)
        shards[alias] = Shard(name, at(rank), local, at, replica)
    return shards


def _dimension(parameter: DTensor) -> int | None:
    """Return the dimension along which owners share ``parameter``, None without one."""
    axes = parameter.device_mesh.mesh_dim_names
    assert axes is not None, "the meshes of a load have names"
    placement: Any = parameter.placements[axes.index("shard")]
    return None if placement.is_replicate() else int(placement.dim)


# Tensor parallelism under FSDP2: parameters as DTensors over the tensor mesh, modules in their styles.

#: The style of modules with whole parameters that see part of the activations, such as norms of heads.
_SUMMED = "replicated_with_grad_allreduce"


def cut_tensors(model: nn.Module, parallelism: Parallelism, mesh: DeviceMesh) -> None:
    """Cut the meta parameters of ``model`` over ``mesh``, and adapt its modules.

    Raises EngineError for a cut without a placement in DTensor.
    """
    new: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        spec = parallelism.tensors.cuts.get(name)
        if spec is None:
            if _beside_a_cut(name, parallelism):
                # Also a DTensor: its layer adds it to one, and the two kinds do not mix.
                new[id(parameter)] = make_distributed(parameter, parameter.data, mesh, [Replicate()])
            continue
        shape = spec.section(tuple(parameter.shape), *parallelism.mesh.tensor(mesh.get_local_rank())).shape
        local = torch.empty(shape, dtype=parameter.dtype, device="meta")
        new[id(parameter)] = make_distributed(parameter, local, mesh, [_placement(spec, parameter.dim())])
    replace_everywhere(model, new)
    for name, style in parallelism.tensors.modules.items():
        module = model.get_submodule(name)
        if style == _SUMMED:
            _sum_gradients(module, mesh.get_group())
        else:
            run_in_style(model, module, style, mesh)


def _beside_a_cut(name: str, parallelism: Parallelism) -> bool:
    module, _, leaf = name.rpartition(".")
    return leaf == "bias" and f"{module}.weight" in parallelism.tensors.cuts


def _placement(spec: ShardSpec | Ranges, dimensions: int) -> Placement:
    """DTensor's name for a cut."""
    dim = spec.dim % dimensions
    if isinstance(spec, Ranges):
        raise EngineError("DTensor has no placement for cuts at any places")
    return ShardPlacement(dim) if spec.parts == 1 else _StridedShard(dim, split_factor=spec.parts)


def make_distributed(
    old: nn.Parameter, local: torch.Tensor, mesh: DeviceMesh, placements: Any
) -> nn.Parameter:
    """A parameter like ``old`` whose local tensor over ``mesh`` is ``local``."""
    data = DTensor.from_local(local, mesh, placements, run_check=False, shape=old.shape, stride=old.stride())
    new = nn.Parameter(data, requires_grad=old.requires_grad)
    new.__dict__.update({k: v for k, v in old.__dict__.items() if not k.startswith("_local")})
    return new


def _sum_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Sum the gradients of a module's parameters over ``group``.

    A hook on the accumulated gradient, as transformers has it, would sum earlier sums again when gradients
    are accumulated without reduction.
    """
    runner: Any = module
    own_forward, summed = runner.forward, cast(Any, _Summed.apply)

    def forward(*args: object, **kwargs: object) -> object:
        parameters: dict[str, Any] = module._parameters
        whole = {name: p for name, p in parameters.items() if p is not None}
        parameters.update({name: summed(p, group) for name, p in whole.items()})
        try:
            return own_forward(*args, **kwargs)
        finally:
            parameters.update(whole)

    runner.forward = forward


class _Summed(torch.autograd.Function):
    """Return the tensor, equal on all ranks; sum its gradient over the ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> object:
        summed = gradient.contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None
