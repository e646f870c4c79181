"""FSDP2 shards where a mesh cuts experts or tensors: DTensors over that mesh, sharded over their owners.

Experts are units of their own. Their gradients are sums over the batches of all ranks, since tokens come from
everywhere, while their owners are fewer: so the sum is divided by the number of batches, and not of owners.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement

from zerostart.distributed.world import World, default_device
from zerostart.engines.exchange import exchange_tokens, expert_modules
from zerostart.engines.fsdp2.blocks import blocks_of
from zerostart.engines.fsdp2.layouts import MeshShares
from zerostart.engines.fsdp2.settings import FSDP2Settings
from zerostart.engines.fsdp2.state import FSDP2StateEngine
from zerostart.engines.fsdp2.storage import arena_of, give_storage
from zerostart.engines.fsdp2.tensors import cut_tensors, distributed
from zerostart.engines.fsdp2.units import scalars_of, units_of
from zerostart.engines.names import loaded_names
from zerostart.engines.residence import Residence
from zerostart.engines.same_draws import share_draws
from zerostart.engines.shard import Shard
from zerostart.geometry.layout import Parallelism
from zerostart.upstream.transformers.tensor import require as require_styles


class FSDP2ParallelShards:
    """Makes FSDP2 shards over the owners of each section of a mesh; see ``FSDP2Settings.check_mesh``."""

    def __init__(self, world: World, settings: FSDP2Settings, parallelism: Parallelism) -> None:
        if parallelism.mesh.tensor_parallel > 1:
            require_styles()
        self._settings = settings
        self._parallelism = parallelism
        self._rank = world.rank
        self.device = default_device()
        mesh, replicas = parallelism.mesh, settings.replicate
        with world.collectives("making the device meshes"):
            self._dense, self._tensors = self._meshes(replicas, mesh.tensor_parallel, "tensor")
            self._owners, self._experts = self._meshes(replicas, mesh.expert_parallel, "expert")

    def _meshes(self, replicas: int, size: int, axis: str) -> tuple[DeviceMesh, DeviceMesh]:
        """The ranks that share what an axis of ``size`` ranks leaves whole, replicas first; and that axis."""
        sizes = (replicas, self._parallelism.mesh.world_size // (replicas * size), size)
        whole = init_device_mesh(self.device.type, sizes, mesh_dim_names=("replicate", "shard", axis))
        return whole["shard"] if replicas == 1 else whole["replicate", "shard"], whole[axis]

    def agree_on_residence(self, model: nn.Module, names: Sequence[str]) -> Residence | None:
        """Nothing is whole."""
        return None

    def shard(self, model: nn.Module, names: Sequence[str]) -> list[Shard]:
        """Cut the experts, wrap them, the model's blocks and then its root; give local shards storage."""
        settings, whole = self._settings, dict(model.named_parameters())
        shapes = {name: tuple(parameter.shape) for name, parameter in whole.items()}
        shares = MeshShares.planned(settings, self._parallelism, whole)
        if self._tensors.size() > 1:
            cut_tensors(model, self._parallelism, self._tensors)
            share_draws(model, self._tensors.get_group())
        experts = expert_modules(model, self._parallelism)
        for module, own in experts.items():
            self._cut_experts(module, own)
        dims: dict[int, int] = {}
        for name, parameter in model.named_parameters():
            if parameter.dim():
                dims[id(parameter)] = shares.dimension(name, *shares.section(name, shapes[name], self._rank))
        options = {
            **settings.options(),
            "ignored_params": scalars_of(model),
            "shard_placement_fn": lambda parameter: ShardPlacement(dims[id(parameter)]),
        }
        for module in experts:
            self._wrap_experts(module, units_of(module, ())[-1].options(options))
        for unit in units_of(model, blocks_of(model, settings.wrap)):
            fully_shard(unit.module, mesh=self._dense, **unit.options(options))
        return give_storage(
            model,
            names,
            arena_of(settings, self.device),
            self._rank,
            lambda name, rank: shares.layout(name, shapes[name], rank),
            lambda name: shares.chunk(name, shapes[name], self._rank),
        )

    def finish(self, model: nn.Module) -> int:
        """Nothing is left to do: FSDP2 looks at the storages themselves."""
        return 0

    def _cut_experts(self, module: nn.Module, names: Mapping[str, str]) -> None:
        """Cut the parameters of one experts module, and make it serve all ranks' tokens."""
        counts: list[int] = []
        for leaf, name in names.items():
            old = module._parameters[leaf]
            assert old is not None, "a cut names a parameter that is there"
            sections = self._parallelism.expert_sections(name)
            counts = [section.shape[0] for section in sections]
            local = torch.empty(
                sections[self._experts.get_local_rank()].shape, dtype=old.dtype, device="meta"
            )
            module._parameters[leaf] = distributed(old, local, self._experts, [ShardPlacement(0)])
        alike = self._tensors.get_group() if self._tensors.size() > 1 else None
        exchange_tokens(module, self._experts.get_group(), counts, alike=alike)

    def _wrap_experts(self, module: nn.Module, options: Mapping[str, Any]) -> None:
        """Shard one experts module over its owners."""
        policy, alone = options.get("mp_policy"), self._owners.shape[-1] == 1
        if alone and policy is not None and torch.float16 in (policy.reduce_dtype, policy.param_dtype):
            # What is reduced in half precision FSDP2 divides before and after, and of one owner in between.
            options = {**options, "mp_policy": replace(policy, reduce_dtype=torch.float32)}
        fully_shard(module, mesh=self._owners, **options)
        unit: Any = module
        unit.set_gradient_divide_factor(float(self._parallelism.mesh.world_size))
        # As a sum that is divided afterwards: gloo has no reduction with a factor, and NCCL's gives zeros in
        # bfloat16 (pytorch #190745; read there, not run here). One owner has nothing to reduce, and FSDP2
        # divides anyway.
        unit.set_force_sum_reduction_for_comms(not alone)


def parallel_shards(
    model: nn.Module, settings: FSDP2Settings, parallelism: Parallelism, rank: int
) -> dict[str, Shard]:
    """The shards of ``model`` as they are now; parameters that a forward left gathered are resharded."""
    FSDP2StateEngine.put_to_rest(model)
    names = loaded_names(model)
    # A tied parameter lies as its first name says.
    found = {
        alias: (names[alias], parameter)
        for alias, parameter in model.named_parameters(remove_duplicate=False)
        if isinstance(parameter, DTensor)
    }
    given = settings.shard_placement_fn is not None
    dims = {name: _dimension(parameter) for name, parameter in found.values()}
    shares = MeshShares.of(settings, parallelism, dims if given else None)
    shards = {}
    for alias, (name, parameter) in found.items():
        at = functools.partial(shares.layout, name, tuple(parameter.shape))
        local = parameter.to_local().detach().view(-1)
        shards[alias] = Shard(name, at(rank), local, at, shares.holders(name, rank))
    return shards


def _dimension(parameter: DTensor) -> int:
    """The dimension along which owners share ``parameter``; see ``FSDP2ParallelShards._meshes``."""
    axes = parameter.device_mesh.mesh_dim_names
    assert axes is not None, "the meshes of a load have names"
    placement: Any = parameter.placements[axes.index("shard")]
    return int(placement.dim)
