"""The plan: catalog x recipe x layout, as the reads that one rank makes and where their bytes go."""

from zerostart.planning.census import Count, Runs, Share, count_reads, runs_of
from zerostart.planning.join import PlanOptions, join
from zerostart.planning.plan import Destination, Part, Plan, Read

__all__ = [
    "Count",
    "Destination",
    "Part",
    "Plan",
    "PlanOptions",
    "Read",
    "Runs",
    "Share",
    "count_reads",
    "join",
    "runs_of",
]
