"""The plan: catalog x recipe x layout, as the reads that one rank makes and where their bytes go."""

from zerostart.transfer.planning.census import Count, Extents, Share, count_reads, extents_of, requests_of
from zerostart.transfer.planning.cost import MARGIN, Rates, ReadStrategy, Traffic, choose
from zerostart.transfer.planning.exchange import (
    Agreement,
    Delivery,
    Exchange,
    ExchangeStep,
    Machines,
    Table,
    batches,
    exchange_schedule,
    given_away,
    part_of,
    pieces_within,
    reassigned,
    slow_ranks,
    spans_within,
    table_of,
)
from zerostart.transfer.planning.join import join
from zerostart.transfer.planning.plan import Computation, Destination, Part, Plan, Read, Step
from zerostart.transfer.planning.reads import PlanOptions

__all__ = [
    "MARGIN",
    "Machines",
    "Agreement",
    "Computation",
    "Count",
    "Delivery",
    "Destination",
    "ExchangeStep",
    "Exchange",
    "Extents",
    "Part",
    "Plan",
    "PlanOptions",
    "Rates",
    "Read",
    "Share",
    "ReadStrategy",
    "Step",
    "Table",
    "Traffic",
    "batches",
    "choose",
    "count_reads",
    "join",
    "pieces_within",
    "requests_of",
    "exchange_schedule",
    "extents_of",
    "given_away",
    "part_of",
    "reassigned",
    "slow_ranks",
    "spans_within",
    "table_of",
]
