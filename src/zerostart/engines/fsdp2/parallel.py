"""FSDP2 shards where a mesh cuts experts or tensors: DTensors over that mesh, sharded over their owners.

Experts are units of their own. Their gradients are sums over the batches of all ranks, since tokens come from
everywhere, while their owners are fewer: so the sum is divided by the number of batches, and not of owners.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement

from zerostart.distributed.world import World, default_device
from zerostart.engines.exchange import exchange_tokens, expert_modules
from zerostart.engines.fsdp2.blocks import blocks_of
from zerostart.engines.fsdp2.layouts import expert_dimension, share_of
from zerostart.engines.fsdp2.settings import FSDP2Settings
from zerostart.engines.fsdp2.storage import give_storage
from zerostart.engines.fsdp2.tensors import cut_tensors, distributed
from zerostart.engines.fsdp2.units import scalars_of, units_of
from zerostart.engines.names import loaded_names
from zerostart.engines.placements import Placements
from zerostart.engines.residence import Residence
from zerostart.engines.shard import Shard
from zerostart.layout import Layout, Parallelism
from zerostart.transfer import Arena
from zerostart.upstream.transformers_tensor import require as require_styles

__all__ = ["FSDP2ParallelShards", "parallel_shards"]


class FSDP2ParallelShards:
    """Makes FSDP2 shards over the owners of each section of a mesh; see ``FSDP2Settings.check_mesh``."""

    def __init__(
        self,
        world: World,
        settings: FSDP2Settings,
        parallelism: Parallelism,
        placements: Placements,
    ) -> None:
        if parallelism.mesh.tensor_parallel > 1:
            require_styles()
        self._wrap = settings.wrap
        self._options = settings.options()
        self._parallelism = parallelism
        self._placements = placements
        self._rank = world.rank
        self.device = default_device()
        mesh = parallelism.mesh
        sizes = (mesh.world_size // mesh.tensor_parallel, mesh.tensor_parallel)
        owners = mesh.world_size // mesh.expert_parallel
        with world.collectives("making the device meshes"):
            dense = init_device_mesh(self.device.type, sizes, mesh_dim_names=("data", "tensor"))
            self._experts = init_device_mesh(
                self.device.type, (owners, mesh.expert_parallel), mesh_dim_names=("expert_data", "expert")
            )
        self._dense, self._tensors = dense["data"], dense["tensor"]

    def agree_on_residence(self, model: nn.Module, names: Sequence[str]) -> Residence | None:
        """Nothing is whole."""
        return None

    def shard(self, model: nn.Module, names: Sequence[str]) -> list[Shard]:
        """Cut the experts, wrap them, the model's blocks and then its root; give local shards storage."""
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        if self._tensors.size() > 1:
            cut_tensors(model, self._parallelism, self._tensors)
        for module, own in expert_modules(model, self._parallelism).items():
            self._wrap_experts(module, own)
        options = {**self._options, "ignored_params": scalars_of(model)}
        for unit in units_of(model, blocks_of(model, self._wrap)):
            fully_shard(unit.module, mesh=self._dense, **unit.options(options))

        def chunk(name: str) -> tuple[int, ...]:
            section = self._parallelism.section(name, shapes[name], self._rank).shape
            if not section:
                return ()
            owners = self._parallelism.owners(name, self._rank)[1]
            dim = expert_dimension(section, owners) if self._parallelism.is_expert(name) else 0
            return (*section[:dim], -(-section[dim] // owners), *section[dim + 1 :])

        return give_storage(model, names, Arena(self.device), self._rank, self._placements.layout, chunk)

    def finish(self, model: nn.Module) -> int:
        """Nothing is left to do: FSDP2 looks at the storages themselves."""
        return 0

    def _wrap_experts(self, module: nn.Module, names: Mapping[str, str]) -> None:
        """Cut the parameters of one experts module, make it serve all ranks' tokens, and shard it."""
        options = units_of(module, ())[-1].options(self._options)
        expert, owners = self._experts["expert"], self._experts["expert_data"]
        counts: list[int] = []
        for leaf, name in names.items():
            old = module._parameters[leaf]
            assert old is not None, "a cut names a parameter that is there"
            sections = self._parallelism.expert_sections(name)
            counts = [section.shape[0] for section in sections]
            local = torch.empty(sections[expert.get_local_rank()].shape, dtype=old.dtype, device="meta")
            module._parameters[leaf] = distributed(old, local, expert, [ShardPlacement(0)])
        exchange_tokens(module, expert.get_group(), counts)
        fully_shard(module, mesh=owners, shard_placement_fn=_placement_over(owners.size()), **options)
        unit: Any = module
        unit.set_gradient_divide_factor(float(self._parallelism.mesh.world_size))
        # As a sum that is divided afterwards: gloo has no reduction with a factor, and NCCL's gives zeros in
        # bfloat16 (pytorch #190745). One owner has nothing to reduce, and FSDP2 divides anyway.
        unit.set_force_sum_reduction_for_comms(owners.size() > 1)


def _placement_over(owners: int) -> Any:
    def place(parameter: nn.Parameter) -> ShardPlacement:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return ShardPlacement(expert_dimension(tuple(local.shape), owners))

    return place


def parallel_shards(model: nn.Module, parallelism: Parallelism, rank: int) -> dict[str, Shard]:
    """The shards of ``model`` as they are now; parameters that a forward left gathered are resharded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    names = loaded_names(model)
    shards = {}
    for alias, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, DTensor):
            name = names[alias]  # A tied parameter lies as its first name says.
            at = functools.partial(_layout, parallelism, name, tuple(parameter.shape))
            local = parameter.to_local().detach().view(-1)
            shards[alias] = Shard(name, at(rank), local, at, parallelism.holders(name, rank))
    return shards


def _layout(parallelism: Parallelism, name: str, shape: tuple[int, ...], rank: int) -> Layout:
    section = parallelism.section(name, shape, rank)
    return section.holds(share_of(parallelism, name, section, *parallelism.owners(name, rank)))
