"""FSDP2's layouts, without a mesh."""

from __future__ import annotations

from collections.abc import Sequence

from zerostart.layout import Layout, dimension_shard

__all__ = ["expert_dimension", "parameter_layout"]


def parameter_layout(shape: Sequence[int], share: int, shares: int, dim: int = 0) -> Layout:
    """``Shard(dim)``, chunks of equal size but the last, padded to a full chunk."""
    return dimension_shard(shape, dim, share, shares)


def expert_dimension(shape: Sequence[int], owners: int) -> int:
    """The dimension along which the ``owners`` of local experts share them.

    The experts' own, unless that would leave owners without any: then the next that divides evenly, since
    FSDP2 shards no other dimension unevenly.
    """
    if owners <= shape[0]:
        return 0
    return next((dim for dim in range(1, len(shape)) if shape[dim] % owners == 0), 0)
