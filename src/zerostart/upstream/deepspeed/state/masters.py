"""fp32 masters that were read from a checkpoint, and parameters that were changed since they were loaded."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from zerostart.upstream.deepspeed.zero3.partitions import partition_available
from zerostart.upstream.guard import Use, demand

logger = logging.getLogger("zerostart")

TOUCHED = (
    Use(
        "deepspeed.runtime.swap_tensor.partitioned_param_swapper:AsyncPartitionedParameterSwapper",
        "swap_in, remove_partition_and_release_buffers",
        "a partition on NVMe is compared with its master in one of the swap buffers",
    ),
)

#: Elements that are compared at a time: some MiB of temporary memory.
_CHUNK = 1 << 20


def follow(master: torch.Tensor, held: torch.Tensor) -> bool:
    """Make a master follow what its parameter holds, where that has been changed since; whether it was.

    Both are 1-D and of one size. Elsewhere the master rounds to what is held, which is how that was made.
    """
    found = False
    for start in range(0, master.numel(), _CHUNK):
        high = master[start : start + _CHUNK]
        low = held[start : start + _CHUNK].to(high.device)
        other = high.to(low.dtype) != low
        if bool(other.any()):
            high.copy_(torch.where(other, low.to(high.dtype), high))
            found = True
    return found


def tell_changed(names: Sequence[str]) -> None:
    """Log the parameters whose masters do not start from the checkpoint."""
    if names:
        logger.info(
            "%d parameters were changed between the load and the start of the engine (%s%s): "
            "their fp32 masters start from the changed values",
            len(names),
            ", ".join(names[:3]),
            ", ..." if len(names) > 3 else "",
        )


def follow_partition(master: torch.Tensor, parameter: Any) -> bool:
    """``follow`` for the partition of ``parameter``, which may be on NVMe."""
    swapped = not partition_available(parameter.ds_tensor)
    if swapped:
        demand(TOUCHED, "Leave the parameters in memory: offload_param to cpu")
        parameter.nvme_swapper.swap_in([parameter], async_op=False)
    found = follow(master, parameter.ds_tensor.data)
    if swapped:
        parameter.nvme_swapper.remove_partition_and_release_buffers([parameter])
    return found
