"""The plan: catalog x recipe x layout, as the reads that one rank makes and where their bytes go."""

from zerostart.plan.join import PlanOptions, join
from zerostart.plan.plan import Destination, Part, Plan, Read

__all__ = ["Destination", "Part", "Plan", "PlanOptions", "Read", "join"]
