"""Layouts: the elements of a parameter on a rank, and their places in its storage.

Pure integers.
"""

from zerostart.geometry.layout.layout import (
    Layout,
    LocalBox,
    Section,
    dimension_shard,
    flat_partition,
    packed_section,
    replicated,
    whole_section,
)
from zerostart.geometry.layout.parallel_plans import (
    Mesh,
    Parallelism,
    ParallelPlan,
    Ranges,
    ShardSpec,
    expand,
    expert_plan,
    rules_without,
    shard_spec_of,
    tensor_plan,
)

__all__ = [
    "ShardSpec",
    "Layout",
    "Mesh",
    "ParallelPlan",
    "Parallelism",
    "LocalBox",
    "Ranges",
    "Section",
    "shard_spec_of",
    "dimension_shard",
    "whole_section",
    "expand",
    "expert_plan",
    "flat_partition",
    "packed_section",
    "replicated",
    "rules_without",
    "tensor_plan",
]
