"""Where a rank's share of a parameter lies once the mesh and the engine have both cut it."""

from __future__ import annotations

from collections.abc import Sequence

from zerostart.engines.fsdp2.layouts import expert_dimension
from zerostart.layout import Layout, Parallelism, dimension_shard, flat_partition

__all__ = ["parallel_layout"]


def parallel_layout(
    engine: str, parallelism: Parallelism, name: str, shape: Sequence[int], rank: int
) -> Layout:
    """What ``rank`` holds of ``name``, of the unsharded ``shape``: its section, shared with others."""
    section = parallelism.section(name, shape, rank)
    place, owners = parallelism.owners(name, rank)
    if engine == "deepspeed":
        return section.holds(flat_partition(section.shape, place, owners))
    dim = expert_dimension(section.shape, owners) if parallelism.is_expert(name) else 0
    return section.holds(dimension_shard(section.shape, dim, place, owners))
