"""The plan: catalog x recipe x layout, as the reads that one rank makes and where their bytes go."""

from zerostart.transfer.planning.census import Count, Share, count_reads
from zerostart.transfer.planning.exchange import (
    Batch,
    Group,
    batches,
    find_groups,
    find_levels,
    make_rounds,
    read_by_place,
)
from zerostart.transfer.planning.join import join
from zerostart.transfer.planning.plan import Computation, Destination, Part, Plan, Read, SharedReads, Step
from zerostart.transfer.planning.reads import PlanOptions

__all__ = [
    "Batch",
    "Computation",
    "Count",
    "Destination",
    "Group",
    "Part",
    "Plan",
    "PlanOptions",
    "Read",
    "Share",
    "SharedReads",
    "Step",
    "batches",
    "count_reads",
    "find_groups",
    "find_levels",
    "join",
    "make_rounds",
    "read_by_place",
]
