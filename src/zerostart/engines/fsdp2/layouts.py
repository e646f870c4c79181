"""FSDP2's layouts, without a mesh."""

from __future__ import annotations

from collections.abc import Sequence

from zerostart.layout import Layout, dimension_shard

__all__ = ["parameter_layout"]


def parameter_layout(shape: Sequence[int], rank: int, world_size: int) -> Layout:
    """``Shard(0)``, chunks of equal size but the last, padded to a full chunk."""
    return dimension_shard(shape, 0, rank, world_size)
