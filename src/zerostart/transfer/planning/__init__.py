"""Plans: the reads of one rank and their destinations, from catalog, recipe and layout."""

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
