"""Process groups of experts in DeepSpeed, and marks of their parameters."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from zerostart.upstream.deepspeed import zero3_partitions as upstream
from zerostart.upstream.deepspeed.construction import OWN_STATE_DICT, own_state_dicts
from zerostart.upstream.deepspeed.zero12_groups import TOUCHED as GROUPING
from zerostart.upstream.deepspeed.zero12_groups import grouping, mark_expert_of
from zerostart.upstream.guard import Use, demand
from zerostart.upstream.patches import RefCountedPatches

if TYPE_CHECKING:
    from types import ModuleType

_GROUPS = Use(
    "deepspeed.utils.groups",
    "_create_expert_and_data_parallel(expert_parallel_size_), _get_expert_parallel_group, "
    "_get_expert_parallel_group_dict, _get_expert_data_parallel_group",
    "DeepSpeed's own groups of ranks that share experts",
)
_PARTITIONED = Use(
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3",
    "_autoep_expert_parallel_group",
    "a parameter of experts is partitioned among the ranks that have it",
)
_MARKS = Use(
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer",
    "get_grad_norm_direct, is_moe_group, _configure_moe_settings",
    "a gradient is summed over the ranks that hold the same experts",
)
TOUCHED = (_GROUPS, _PARTITIONED, _MARKS)


def require_groups() -> None:
    """Raise UnsupportedVersionError unless the expert groups are as expected."""
    upstream.require_version()
    demand((_GROUPS, _PARTITIONED))


class ExpertGroups:
    """Create this rank's groups: ranks that share experts, and owners of the same experts."""

    def __init__(self, expert_parallel: int) -> None:
        upstream.join_group()
        from deepspeed.utils import groups

        private: ModuleType = groups
        self.size = expert_parallel
        self.name = f"ep_size_{expert_parallel}"
        if self.name not in private._get_expert_parallel_group_dict():
            private._create_expert_and_data_parallel(expert_parallel)
        self.experts: dist.ProcessGroup = private._get_expert_parallel_group(self.name)
        self.owners: dist.ProcessGroup = private._get_expert_data_parallel_group(self.name)


def mark_expert(parameter: Any, groups: ExpertGroups) -> None:
    """Partition ``parameter``, not converted yet, among the owners of its experts."""
    parameter.ds_zero_placement_family = "autoep_expert"
    parameter.ds_zero_partition_group_name = groups.name
    parameter.ds_zero_partition_process_group = groups.owners


def mark_flat_expert(parameter: Any, groups: ExpertGroups) -> None:
    """Partition the optimizer state of ``parameter`` among the owners of its experts."""
    demand((_MARKS, OWN_STATE_DICT, *GROUPING), "Use zero_stage=3")
    parameter.allreduce = False
    parameter.group_name = groups.name
    parameter.tensor_model_parallel = True
    mark_expert_of(parameter, _marks.ticket())


#: Marks of an expert, from here and from ``construction.note_shared``.
_ATTRIBUTES = (
    "ds_zero_placement_family",
    "ds_zero_partition_group_name",
    "ds_zero_partition_process_group",
    "allreduce",
    "group_name",
    "tensor_model_parallel",
    "_zerostart_flat_expert",
    "_zerostart_shared_expert",
)


def mark_like(parameter: Any, expert: Any) -> None:
    """Give ``parameter`` the marks of a parameter of the same experts."""
    for name in _ATTRIBUTES:
        if hasattr(expert, name):
            setattr(parameter, name, getattr(expert, name))


def _enter(stack: ExitStack) -> None:
    for patches in (grouping, own_state_dicts):
        patches.open()
        stack.callback(patches.close)


_marks = RefCountedPatches(_enter)
