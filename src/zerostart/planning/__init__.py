"""The plan: catalog x recipe x layout, as the reads that one rank makes and where their bytes go."""

from zerostart.planning.census import Count, Runs, Share, count_reads, runs_of
from zerostart.planning.errands import (
    Agreement,
    Delivery,
    Errand,
    Exchange,
    Table,
    errands_of_one,
    pieces_within,
    shared_errands,
    spans_within,
    table_of,
)
from zerostart.planning.join import join
from zerostart.planning.plan import Computation, Destination, Part, Plan, Read, Step
from zerostart.planning.reads import PlanOptions
from zerostart.planning.sharing import MARGIN, Rates, Sharing, Traffic, choose

__all__ = [
    "MARGIN",
    "Agreement",
    "Computation",
    "Count",
    "Delivery",
    "Destination",
    "Errand",
    "Exchange",
    "Part",
    "Plan",
    "PlanOptions",
    "Rates",
    "Read",
    "Runs",
    "Share",
    "Sharing",
    "Step",
    "Table",
    "Traffic",
    "choose",
    "count_reads",
    "errands_of_one",
    "join",
    "pieces_within",
    "runs_of",
    "shared_errands",
    "spans_within",
    "table_of",
]
