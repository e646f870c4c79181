"""The plan: catalog x recipe x layout, as the reads that one rank makes and where their bytes go."""

from zerostart.planning.census import Count, Runs, Share, count_reads, runs_of
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
    "Runs",
    "Share",
    "Step",
    "count_reads",
    "join",
    "runs_of",
]
