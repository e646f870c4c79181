"""FSDP2 shards where a mesh cuts experts or tensors: DTensors over that mesh, sharded over their owners.

Experts are units of their own. Their gradients are sums over the batches of all ranks, since tokens come from
everywhere, while their owners are fewer: so the sum is divided by the number of batches, and not of owners.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement

from zerostart.engines.exchange import exchange_tokens, expert_modules
from zerostart.engines.fsdp2.engine import OPTIONS, blocks_of
from zerostart.engines.fsdp2.layouts import expert_dimension
from zerostart.engines.fsdp2.tensors import cut_tensors, distributed
from zerostart.engines.placement import parallel_layout
from zerostart.engines.shard import Shard, replace_everywhere
from zerostart.errors import ConfigError, EngineError
from zerostart.layout import Layout, Parallelism
from zerostart.transfer import Arena
from zerostart.upstream.torch import adopt_local_tensors, hide_padding
from zerostart.upstream.transformers_tensor import require as require_styles
from zerostart.world import World, default_device

__all__ = ["FSDP2ParallelShards", "parallel_shards"]


class FSDP2ParallelShards:
    """Makes FSDP2 shards over the owners of each section of a mesh.

    ``engine_config`` is as for ``FSDP2Shards``, less ``mesh``, and with ``ep_plan`` and ``tp_plan``.
    """

    def __init__(
        self, world: World, engine_config: Mapping[str, Any] | None, parallelism: Parallelism
    ) -> None:
        options = dict(engine_config or {})
        self._wrap: Sequence[str] | None = options.pop("wrap", None)
        for plan in ("ep_plan", "tp_plan", "tensor_parallel"):
            options.pop(plan, None)
        known = [option for option in OPTIONS if option != "mesh"]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ConfigError(
                f"engine_config for fsdp2 with experts or tensors cut has unknown keys {', '.join(unknown)}; "
                f"known are wrap, ep_plan, tp_plan, tensor_parallel, {', '.join(known)}"
            )
        if "CPU" in type(options.get("offload_policy")).__name__:
            raise EngineError("FSDP2 with CPU offload is not available here; remove offload_policy")
        if parallelism.mesh.tensor_parallel > 1:
            require_styles()
        self._options = options
        self._parallelism = parallelism
        self._rank = world.rank
        self.device = default_device()
        mesh = parallelism.mesh
        sizes = (mesh.world_size // mesh.tensor_parallel, mesh.tensor_parallel)
        dense = init_device_mesh(self.device.type, sizes, mesh_dim_names=("data", "tensor"))
        self._dense, self._tensors = dense["data"], dense["tensor"]
        owners = mesh.world_size // mesh.expert_parallel
        self._experts = init_device_mesh(
            self.device.type, (owners, mesh.expert_parallel), mesh_dim_names=("expert_data", "expert")
        )

    def shard(self, model: nn.Module, names: Sequence[str]) -> list[Shard]:
        """Cut the experts, wrap them, the model's blocks and then its root; give local shards storage."""
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        if self._tensors.size() > 1:
            cut_tensors(model, self._parallelism, self._tensors)
        for module, own in expert_modules(model, self._parallelism).items():
            self._wrap_experts(module, own)
        for block in blocks_of(model, self._wrap):
            if not isinstance(block, FSDPModule):
                fully_shard(block, mesh=self._dense, **self._options)
        if not isinstance(model, FSDPModule):
            fully_shard(model, mesh=self._dense, **self._options)
        return self._store(model, names, shapes)

    def finish(self, model: nn.Module) -> None:
        """Nothing is left to do: FSDP2 looks at the storages themselves."""

    def _wrap_experts(self, module: nn.Module, names: Mapping[str, str]) -> None:
        """Cut the parameters of one experts module, make it serve all ranks' tokens, and shard it."""
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
        fully_shard(module, mesh=owners, shard_placement_fn=_placement_over(owners.size()), **self._options)
        unit: Any = module
        unit.set_gradient_divide_factor(float(self._parallelism.mesh.world_size))
        # As a sum that is divided afterwards: gloo has no reduction with a factor, and NCCL's gives zeros in
        # bfloat16 (pytorch #190745). One owner has nothing to reduce, and FSDP2 divides anyway.
        unit.set_force_sum_reduction_for_comms(owners.size() > 1)

    def _store(
        self, model: nn.Module, names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]
    ) -> list[Shard]:
        parameters = dict(model.named_parameters())
        arena = Arena(self.device)
        placed: list[tuple[str, Layout, int]] = []
        for name in names:
            layout = parallel_layout("fsdp2", self._parallelism, name, shapes[name], self._rank)
            placed.append((name, layout, arena.reserve(layout.numel, parameters[name].dtype)))
        new: dict[int, nn.Parameter] = {}
        shards = []
        for name, layout, place in placed:
            old = parameters[name]
            storage = arena.take(place, layout.numel, old.dtype)
            new[id(old)] = self._over(old, name, shapes[name], storage)
            shards.append(Shard(name, layout, storage))
        replace_everywhere(model, new)
        adopt_local_tensors(model)
        for name, layout, _ in placed:
            hide_padding(new[id(parameters[name])], layout.owned)
        return shards

    def _over(
        self, old: nn.Parameter, name: str, shape: tuple[int, ...], storage: torch.Tensor
    ) -> nn.Parameter:
        """``old``, a DTensor on meta, over ``storage``, which has room for a full chunk."""
        data = old.data
        if not isinstance(data, DTensor):
            raise EngineError(f"fully_shard left {name} unsharded")
        section = self._parallelism.section(name, shape, self._rank).shape
        owners = self._parallelism.owners(name, self._rank)[1]
        dim = expert_dimension(section, owners) if self._parallelism.is_expert(name) else 0
        chunk = (*section[:dim], -(-section[dim] // owners), *section[dim + 1 :])
        return distributed(old, storage.view(chunk), data.device_mesh, data.placements)


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
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    shards = {}
    for alias, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, DTensor):
            name = names[id(parameter)]  # A tied parameter lies as its first name says.
            layout = parallel_layout("fsdp2", parallelism, name, tuple(parameter.shape), rank)
            shards[alias] = Shard(name, layout, parameter.to_local().detach().reshape(-1))
    return shards
