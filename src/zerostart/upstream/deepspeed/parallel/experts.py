"""Private parts of DeepSpeed: process groups of experts, and the marks that put a parameter in one.

DeepSpeed sets the same marks for its AutoEP layers.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from zerostart.upstream.deepspeed.zero3 import partitions as upstream
from zerostart.upstream.registry import Lasts, PatchPoint, Use, demand
from zerostart.upstream.shapes import Shape
from zerostart.upstream.versions import DEEPSPEED

_INIT = "deepspeed.runtime.zero.partition_parameters:Init"
_OPTIMIZER = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
TOUCHED = (
    Use(
        library=DEEPSPEED,
        owner="deepspeed.utils.groups",
        names=(
            "_create_expert_and_data_parallel",
            "_get_expert_parallel_group",
            "_get_expert_parallel_group_dict",
            "_get_expert_data_parallel_group",
        ),
        why="DeepSpeed's own groups of ranks that share experts, made once for each size",
        shapes=(
            Shape(
                "deepspeed.utils.groups:_create_expert_and_data_parallel",
                leads=("expert_parallel_size_",),
                has=("X = f'ep_size_{expert_parallel_size_}'",),
            ),
        ),
    ),
    PatchPoint(
        library=DEEPSPEED,
        owner=_INIT,
        writes=("ds_zero_partition_process_group",),
        why="a parameter of experts is partitioned among the ranks that have it",
        lasts=Lasts.MODEL,
        shapes=(
            Shape(
                f"{_INIT}._convert_to_deepspeed_param",
                has=("getattr(param, 'ds_zero_partition_process_group', self.ds_process_group)",),
            ),
        ),
    ),
    PatchPoint(
        library=DEEPSPEED,
        owner=_OPTIMIZER,
        writes=("ds_zero_placement_family", "ds_zero_partition_group_name"),
        why="its gradient is divided by all ranks, and its norm counted over its group",
        lasts=Lasts.MODEL,
        shapes=(
            Shape(
                f"{_OPTIMIZER}._autoep_expert_parallel_group",
                has=(
                    "getattr(X, 'ds_zero_placement_family', 'replicated')",
                    "getattr(X, 'ds_zero_partition_group_name', None)",
                ),
            ),
        ),
    ),
)


def require_groups() -> None:
    """Raise UnsupportedVersionError unless DeepSpeed has what is used of it."""
    upstream.require()
    demand(TOUCHED)


class ExpertGroups:
    """This rank's group of ranks that together have all experts, and its group of those that have the same.

    Collective: DeepSpeed makes the groups, once for each size. See ``require_groups``.
    """

    def __init__(self, expert_parallel: int) -> None:
        upstream.join_group()
        from deepspeed.utils import groups

        private: Any = groups
        self.size = expert_parallel
        self.name = f"ep_size_{expert_parallel}"
        if self.name not in private._get_expert_parallel_group_dict():
            private._create_expert_and_data_parallel(expert_parallel)
        self.experts: dist.ProcessGroup = private._get_expert_parallel_group(self.name)
        self.owners: dist.ProcessGroup = private._get_expert_data_parallel_group(self.name)


def mark_expert(parameter: Any, groups: ExpertGroups) -> None:
    """Have ``parameter``, not converted yet, partitioned and its gradient reduced among its owners."""
    parameter.ds_zero_placement_family = "autoep_expert"
    parameter.ds_zero_partition_group_name = groups.name
    parameter.ds_zero_partition_process_group = groups.owners
