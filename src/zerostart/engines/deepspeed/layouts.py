"""DeepSpeed's layouts, without DeepSpeed."""

from __future__ import annotations

from collections.abc import Sequence

from zerostart.layout import Layout, flat_partition

__all__ = ["parameter_layout"]


def parameter_layout(shape: Sequence[int], rank: int, world_size: int) -> Layout:
    """ZeRO-3: a run of the row-major order."""
    return flat_partition(shape, rank, world_size)
