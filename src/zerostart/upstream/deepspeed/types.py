"""What is used of the tensors that DeepSpeed makes of a model's parameters; it has no classes for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

#: DeepSpeed's configuration, or a section of it: JSON values by name, as its documentation has them.
DeepSpeedConfig: TypeAlias = Mapping[str, Any]


class ZeroPartition(torch.Tensor):
    """``parameter.ds_tensor``: this rank's elements of a ZeRO-3 parameter, 1-D and padded."""

    ds_numel: int
    #: A ``PartitionedParamStatus``: in memory, on NVMe, or being read.
    status: object
    #: Where it goes after a step: NVMe, or None for where it is.
    final_location: object


class ZeroParameter(nn.Parameter):
    """A parameter that ``zero.Init`` has converted: the same object, with attributes set on it.

    Outside of a gathering its own data is an empty placeholder. For who reads the types: nothing is ever an
    instance of it.
    """

    #: Numbered in the order of conversion, by which DeepSpeed sorts its collectives.
    ds_id: int
    #: Shape and elements of the whole parameter; ``shape`` and ``numel()`` are the placeholder's.
    ds_shape: torch.Size
    ds_numel: int
    ds_tensor: ZeroPartition
    #: A ``ZeroParamStatus``: gathered, or not.
    ds_status: object
    #: The ranks that share its partitions.
    ds_process_group: dist.ProcessGroup

    #: What reads its partition from NVMe, None where no parameters are offloaded there.
    nvme_swapper: Any

    def partition_numel(self) -> int:
        """Elements of this rank's partition, padding included."""
        raise NotImplementedError
