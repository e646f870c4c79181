"""Layouts: which elements of a parameter a rank holds, and where in its local storage. Pure integers."""

from zerostart.layout.layout import Layout, Placed, dimension_shard, flat_partition, replicated

__all__ = ["Layout", "Placed", "dimension_shard", "flat_partition", "replicated"]
