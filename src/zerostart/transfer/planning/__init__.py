"""The plan: catalog x recipe x layout, as the reads that one rank makes and where their bytes go."""

from zerostart.transfer.planning.census import Count, Share, count_reads
from zerostart.transfer.planning.join import join
from zerostart.transfer.planning.plan import (
    Computation,
    Destination,
    Part,
    Plan,
    PlanOptions,
    Read,
)

__all__ = [
    "Computation",
    "Count",
    "Destination",
    "Part",
    "Plan",
    "PlanOptions",
    "Read",
    "Share",
    "count_reads",
    "join",
]
