"""FSDP2's layouts where a mesh cuts parameters, without a device mesh.

Replicas are blocks of neighbouring ranks, each with the whole model, cut as if its ranks were all there are.

    world 8, replicate 2, tensor 2:  owners of a cut weight  {0 2} {1 3}  and the same again  {4 6} {5 7}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from zerostart.engines.fsdp2.settings import FSDP2Settings
from zerostart.geometry.layout import Layout, Parallelism, Section, dimension_shard


@dataclass(frozen=True)
class MeshShares:
    """The shares that ranks hold where a mesh has several copies of a model."""

    #: Number of the copies.
    replicas: int
    #: Of one copy.
    parallelism: Parallelism
    #: Dimension along which the owners of each section share it, where a ``shard_placement_fn`` says it; else
    #: None.
    dims: Mapping[str, int] | None

    @classmethod
    def of(
        cls, settings: FSDP2Settings, parallelism: Parallelism, dims: Mapping[str, int] | None
    ) -> MeshShares:
        """Of a mesh that ``settings.check_mesh`` has found right."""
        ranks = parallelism.mesh.world_size // settings.replicate
        # Ranks that share sequences share no parameter for it: they may be of several replicas.
        mesh = replace(parallelism.mesh, world_size=ranks, sequence_parallel=1)
        return cls(settings.replicate, replace(parallelism, mesh=mesh), dims)

    @classmethod
    def planned(
        cls, settings: FSDP2Settings, parallelism: Parallelism, parameters: Mapping[str, nn.Parameter]
    ) -> MeshShares:
        """Of whole ``parameters``, which are asked for; raises EngineError for what FSDP2 cannot shard."""
        given = settings.shard_placement_fn is not None
        dims = {n: settings.dimension(p, n) for n, p in parameters.items() if p.dim()} if given else None
        shares = cls.of(settings, parallelism, dims)
        for name in dims or ():
            for rank in range(max(parallelism.mesh.tensor_parallel, parallelism.mesh.expert_parallel)):
                section, owners = shares.section(name, tuple(parameters[name].shape), rank)
                settings.check_even(name, section.shape, shares.dimension(name, section, owners), owners)
        return shares

    @property
    def ranks(self) -> int:
        """Number of ranks of one replica."""
        return self.parallelism.mesh.world_size

    def section(self, name: str, shape: Sequence[int], rank: int) -> tuple[Section, int]:
        """What the axes give ``rank`` of the parameter ``name``, and how many owners share that."""
        rank %= self.ranks
        return self.parallelism.section(name, shape, rank), self.parallelism.owners(name, rank)[1]

    def dimension(self, name: str, section: Section, owners: int) -> int:
        """The dimension along which the ``owners`` of a section share it."""
        if self.dims is not None:
            return self.dims.get(name, 0)
        return _expert_dimension(section.shape, owners) if self.parallelism.is_expert(name) else 0

    def layout(self, name: str, shape: Sequence[int], rank: int) -> Layout:
        """What ``rank`` holds of the parameter ``name``, whose whole shape is ``shape``."""
        section, owners = self.section(name, shape, rank)
        place = self.parallelism.owners(name, rank % self.ranks)[0]
        return section.holds(
            dimension_shard(section.shape, self.dimension(name, section, owners), place, owners)
        )

    def chunk(self, name: str, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """The shape of a full chunk of the parameter."""
        section, owners = self.section(name, shape, rank)
        if not section.shape:
            return ()
        chunk, dim = list(section.shape), self.dimension(name, section, owners)
        chunk[dim] = -(-chunk[dim] // owners)
        return tuple(chunk)

    def holders(self, name: str, rank: int) -> tuple[int, int]:
        """Place and number of ``rank`` among those with the same share of ``name``."""
        place, count = self.parallelism.holders(name, rank % self.ranks)
        return rank // self.ranks * count + place, self.replicas * count


def _expert_dimension(shape: Sequence[int], owners: int) -> int:
    """The dimension along which the ``owners`` of local experts share them.

    The experts' own, unless that would leave owners without any: then the next that divides evenly, since
    FSDP2 shards no other dimension unevenly.
    """
    if owners <= shape[0]:
        return 0
    return next((dim for dim in range(1, len(shape)) if shape[dim] % owners == 0), 0)
