"""The plan: catalog x recipe x layout, as the reads that one rank makes and where their bytes go."""

from zerostart.planning.census import Count, Share, count_reads
from zerostart.planning.join import join
from zerostart.planning.plan import Computation, Destination, Part, Plan, Read, Step
from zerostart.planning.reads import PlanOptions

__all__ = [
    "Computation",
    "Count",
    "Destination",
    "Part",
    "Plan",
    "PlanOptions",
    "Read",
    "Share",
    "Step",
    "count_reads",
    "join",
]
