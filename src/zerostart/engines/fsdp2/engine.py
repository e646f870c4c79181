"""FSDP2 shards: the model is wrapped on meta, and each local shard gets storage of its own.

``to_empty`` is never called: it would empty non-persistent buffers, untie tied weights, and allocate
page by page.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from zerostart.distributed.world import World, default_device
from zerostart.engines.fsdp2.blocks import blocks_of
from zerostart.engines.fsdp2.settings import FSDP2Settings
from zerostart.engines.fsdp2.storage import arena_of, give_storage, sharded, sharded_layout
from zerostart.engines.fsdp2.units import scalars_of, units_of
from zerostart.engines.residence import Residence
from zerostart.engines.shard import Shard
from zerostart.geometry.layout import Layout, replicated


class FSDP2Shards:
    """Makes FSDP2 shards over a mesh of all ranks, with replicas or without; see ``FSDP2Settings``.

    Parameters that the model keeps in another dtype are units of their own, which the policy does not cast.
    """

    def __init__(self, world: World, settings: FSDP2Settings) -> None:
        self._settings = settings
        replicas, shares = self._settings.shape(world.size)
        device = default_device()
        # Explicit, since without it an accelerator's mesh is made wherever one is present.
        mesh = self._settings.mesh
        if mesh is None:
            shape, names = (
                ((shares,), None) if replicas == 1 else ((replicas, shares), ("replicate", "shard"))
            )
            with world.collectives("making the device mesh"):
                mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        self._mesh = mesh
        self._rank = world.rank
        self.device = torch.device("cpu") if mesh.device_type == "cpu" else device

    def agree_on_residence(self, model: nn.Module, names: Sequence[str]) -> Residence | None:
        """Nothing is whole."""
        return None

    def shard(self, model: nn.Module, names: Sequence[str]) -> list[Shard]:
        """Wrap the model's blocks and then its root; give every local shard storage."""
        shares = self._mesh.shape[-1]
        dims = self._settings.dimensions(dict(model.named_parameters()), shares)
        options = {**self._settings.options(), "ignored_params": scalars_of(model)}
        for unit in units_of(model, blocks_of(model, self._settings.wrap)):
            fully_shard(unit.module, mesh=self._mesh, **unit.options(options))
        tensors = {name: sharded(p, name) for name, p in model.named_parameters() if p.dim()}

        def at(name: str, rank: int) -> Layout:
            return sharded_layout(tensors[name], rank) if name in tensors else replicated(())

        def chunk(name: str) -> list[int]:
            if name not in tensors:
                return []
            shape = list(tensors[name].shape)
            shape[dims[name]] = -(-shape[dims[name]] // shares)
            return shape

        return give_storage(model, names, arena_of(self._settings, self.device), self._rank, at, chunk)

    def finish(self, model: nn.Module) -> int:
        """Nothing is left to do: FSDP2 looks at the storages themselves."""
        return 0
