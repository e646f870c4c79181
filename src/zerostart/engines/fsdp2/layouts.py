"""FSDP2's layouts, without a mesh."""

from __future__ import annotations

from collections.abc import Sequence

from zerostart.layout import Layout, Parallelism, Section, dimension_shard

__all__ = ["expert_dimension", "share_of"]


def expert_dimension(shape: Sequence[int], owners: int) -> int:
    """The dimension along which the ``owners`` of local experts share them.

    The experts' own, unless that would leave owners without any: then the next that divides evenly, since
    FSDP2 shards no other dimension unevenly.
    """
    if owners <= shape[0]:
        return 0
    return next((dim for dim in range(1, len(shape)) if shape[dim] % owners == 0), 0)


def share_of(parallelism: Parallelism, name: str, section: Section, place: int, owners: int) -> Layout:
    """What the owner at ``place`` holds of a section of the parameter ``name``."""
    dim = expert_dimension(section.shape, owners) if parallelism.is_expert(name) else 0
    return dimension_shard(section.shape, dim, place, owners)
