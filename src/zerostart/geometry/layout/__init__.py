"""Layouts: which elements of a parameter a rank holds, and where in its local storage. Pure integers."""

from zerostart.geometry.layout.layout import Layout, Placed, dimension_shard, flat_partition, replicated
from zerostart.geometry.layout.mesh import Mesh
from zerostart.geometry.layout.parallel_plans import (
    Cut,
    Parallelism,
    ParallelPlan,
    Ranges,
    cut_of,
    expand,
    expert_plan,
    rules_without,
    tensor_plan,
)
from zerostart.geometry.layout.section import Section, chunk, entire, packed, ranged

__all__ = [
    "Cut",
    "Layout",
    "Mesh",
    "ParallelPlan",
    "Parallelism",
    "Placed",
    "Ranges",
    "Section",
    "chunk",
    "cut_of",
    "dimension_shard",
    "entire",
    "expand",
    "expert_plan",
    "flat_partition",
    "packed",
    "ranged",
    "replicated",
    "rules_without",
    "tensor_plan",
]
