"""FSDP2 shards: the model is wrapped on meta, and each local shard gets storage of its own.

``to_empty`` is never called: it would empty non-persistent buffers, untie tied weights, and allocate
page by page.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from zerostart.engines.fsdp2.layouts import parameter_layout
from zerostart.engines.fsdp2.units import Unit, units_of
from zerostart.engines.shard import Shard, replace_everywhere
from zerostart.errors import ConfigError, EngineError
from zerostart.transfer import Arena
from zerostart.upstream.torch import adopt_local_tensors, hide_padding
from zerostart.world import World, default_device

__all__ = ["FSDP2Shards", "blocks_of", "current_shards"]

#: Keys of ``engine_config``: the keyword arguments of ``fully_shard`` that a load passes on.
OPTIONS = ("mesh", "reshard_after_forward", "mp_policy", "offload_policy")


class FSDP2Shards:
    """Makes FSDP2 shards over a one-dimensional mesh of all ranks.

    ``engine_config`` holds keyword arguments for ``fully_shard`` (``mesh``, ``reshard_after_forward``,
    ``mp_policy``), and ``wrap``, class names of the modules to be sharded as units.
    Parameters that the model keeps in another dtype are units of their own, which the policy does not cast.
    """

    def __init__(self, world: World, engine_config: Mapping[str, Any] | None) -> None:
        options = dict(engine_config or {})
        self._wrap: Sequence[str] | None = options.pop("wrap", None)
        unknown = sorted(set(options) - set(OPTIONS))
        if unknown:
            raise ConfigError(
                f"engine_config for fsdp2 has unknown keys {', '.join(unknown)}; known are "
                f"wrap, {', '.join(OPTIONS)}"
            )
        if options.get("offload_policy") is not None and "CPU" in type(options["offload_policy"]).__name__:
            raise EngineError(
                "FSDP2 with CPU offload is not available in this version; remove offload_policy"
            )
        self.device = default_device()
        # Explicit, since without it an accelerator's mesh is made wherever one is present.
        mesh = options.pop("mesh", None) or init_device_mesh(self.device.type, (dist.get_world_size(),))
        if mesh.ndim != 1 or mesh.size() != world.size:
            raise EngineError(
                f"the mesh has shape {tuple(mesh.shape)}; this version shards over a one-dimensional "
                f"mesh of all {world.size} ranks"
            )
        self._mesh = mesh
        self.device = torch.device("cpu") if mesh.device_type == "cpu" else self.device
        self._options = options

    def shard(self, model: nn.Module, names: Sequence[str]) -> list[Shard]:
        """Wrap the model's blocks and then its root; give every local shard storage."""
        self._check(model)
        for unit in units_of(model, blocks_of(model, self._wrap)):
            fully_shard(unit.module, mesh=self._mesh, **self._options_of(unit))
        rank, size = self._mesh.get_local_rank(), self._mesh.size()
        parameters = dict(model.named_parameters())
        arena = Arena(self.device)
        placed = []
        for name in names:
            layout = parameter_layout(parameters[name].shape, rank, size)
            placed.append((name, layout, arena.reserve(layout.numel, parameters[name].dtype)))
        new: dict[int, nn.Parameter] = {}
        shards = []
        for name, layout, place in placed:
            old = parameters[name]
            storage = arena.take(place, layout.numel, old.dtype)
            new[id(old)] = _sharded_parameter(old, storage)
            shards.append(Shard(name, layout, storage))
        replace_everywhere(model, new)
        adopt_local_tensors(model)
        for name, layout, _ in placed:
            hide_padding(new[id(parameters[name])], layout.owned)
        return shards

    def _options_of(self, unit: Unit) -> dict[str, Any]:
        """The policy casts what it may; what the model keeps in fp32 is neither cast nor fed casts."""
        policy = self._options.get("mp_policy")
        cast_to = policy.param_dtype if policy is not None else None
        if policy is None or cast_to is None or unit.kind is None or unit.kind[1] == cast_to:
            return self._options
        kept = dataclasses.replace(policy, param_dtype=None, output_dtype=None, cast_forward_inputs=False)
        return {**self._options, "mp_policy": kept}

    def finish(self, model: nn.Module) -> None:
        """Nothing is left to do: FSDP2 looks at the storages themselves."""

    def _check(self, model: nn.Module) -> None:
        scalars = [name for name, p in model.named_parameters() if p.dim() == 0]
        if scalars:
            raise EngineError(
                f"FSDP2 cannot shard parameters without dimensions ({', '.join(scalars[:4])}); give them one "
                "dimension, or use engine='deepspeed'"
            )


def _sharded_parameter(old: nn.Parameter, storage: torch.Tensor) -> nn.Parameter:
    """``old``, a DTensor on meta, over ``storage``, which has room for a full chunk of dimension 0."""
    data = old.data
    if not isinstance(data, DTensor):
        raise EngineError(f"fully_shard left a parameter of shape {tuple(old.shape)} unsharded")
    chunk = storage.view(-1, *old.shape[1:]) if old.numel() else storage.view(0, *old.shape[1:])
    local = DTensor.from_local(
        chunk, data.device_mesh, data.placements, run_check=False, shape=data.shape, stride=data.stride()
    )
    new = nn.Parameter(local, requires_grad=old.requires_grad)
    new.__dict__.update({k: v for k, v in old.__dict__.items() if not k.startswith("_local")})
    return new


def blocks_of(model: nn.Module, wrap: Sequence[str] | None) -> list[nn.Module]:
    """The modules to be sharded as units, innermost first.

    Those whose class is named in ``wrap``, else in the model's ``_no_split_modules``; a plain module's are
    the entries of its outermost ``ModuleList``s. A module that shares a parameter with the rest of the model
    is none.
    """
    named = set(wrap or getattr(model, "_no_split_modules", None) or ())
    if named:
        found = [m for m in model.modules() if type(m).__name__ in named]
        if wrap and not found:
            raise ConfigError(f"no module of the model has a class named in wrap={list(wrap)}")
    else:
        found = [child for part in _outermost_lists(model) for child in part]
    holders = _holders(model)
    blocks = [m for m in found if m is not model and any(True for _ in m.parameters())]
    # FSDP2 wants all holders of a tied parameter in one unit; here that is the root.
    return [m for m in reversed(blocks) if all(holders[id(p)] <= set(m.modules()) for p in m.parameters())]


def _holders(model: nn.Module) -> dict[int, set[nn.Module]]:
    """The modules that hold each parameter, by its ``id``."""
    holders: dict[int, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), set()).add(module)
    return holders


def _outermost_lists(module: nn.Module) -> list[nn.ModuleList]:
    lists: list[nn.ModuleList] = []
    for child in module.children():
        lists += [child] if isinstance(child, nn.ModuleList) else _outermost_lists(child)
    return lists


def current_shards(model: nn.Module) -> dict[str, Shard]:
    """The FSDP2 shards of ``model`` as they are now; parameters that a forward left gathered are resharded.

    Else a root that is kept gathered would show its copy in the compute dtype, and not what is trained.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    shards = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            layout = parameter_layout(parameter.shape, mesh.get_local_rank(), mesh.size())
            local = parameter.to_local().detach().reshape(-1)
            shards[name] = Shard(name, layout, local)
    return shards
