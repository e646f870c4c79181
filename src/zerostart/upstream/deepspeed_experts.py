"""Private parts of DeepSpeed: process groups of experts, and the marks that put a parameter in one.

Used of it: ``utils.groups._create_expert_and_data_parallel``, ``_get_expert_parallel_group``,
``_get_expert_parallel_group_dict`` and ``_get_expert_data_parallel_group``, and three attributes of a
parameter: ``ds_zero_partition_process_group`` (``Init._convert_to_deepspeed_param`` partitions over it),
``ds_zero_placement_family`` and ``ds_zero_partition_group_name`` (ZeRO-3 divides such gradients by the number
of batches, and counts their norm over the expert group as well). DeepSpeed sets them for its AutoEP layers.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from zerostart.errors import UnsupportedVersionError
from zerostart.upstream import deepspeed as upstream

__all__ = ["ExpertGroups", "mark_expert", "require_groups"]

_USED = (
    "_create_expert_and_data_parallel",
    "_get_expert_parallel_group",
    "_get_expert_parallel_group_dict",
    "_get_expert_data_parallel_group",
)


def require_groups() -> None:
    """Raise UnsupportedVersionError unless DeepSpeed has what is used of it."""
    upstream.require()
    from deepspeed.utils import groups

    absent = [name for name in _USED if not hasattr(groups, name)]
    if absent:
        raise UnsupportedVersionError(f"this DeepSpeed has no deepspeed.utils.groups.{', '.join(absent)}")


class ExpertGroups:
    """This rank's group of ranks that together have all experts, and its group of those that have the same.

    Collective: DeepSpeed makes the groups, once for each size. See ``require_groups``.
    """

    def __init__(self, expert_parallel: int) -> None:
        upstream.join_group()
        from deepspeed.utils import groups

        private: Any = groups
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
