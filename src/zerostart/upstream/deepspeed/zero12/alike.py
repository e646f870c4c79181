"""Which parameters are the same on all ranks, found without sending them.

What each rank did to a model since the load cannot be known from outside. So each sums up the words of its
parameters, at the speed of memory, and the sums are compared in one small message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerostart.upstream.torch.word_sums import lanes_of, signed


def alike(parameters: Sequence[torch.Tensor], group: Any) -> list[Any]:
    """Those that hold the same bits on all ranks of ``group``; collective, with one small message."""
    if not parameters or dist.get_world_size(group=group) == 1:
        return list(parameters)
    own = torch.tensor([fingerprint(parameter) for parameter in parameters], device=parameters[0].device)
    extremes = torch.stack([own, ~own])  # ~ reverses the order: the least of it is the greatest.
    dist.all_reduce(extremes, op=dist.ReduceOp.MIN, group=group)
    same = (extremes[0] == ~extremes[1]).all(1).tolist()
    return [parameter for parameter, one in zip(parameters, same, strict=True) if one]


def fingerprint(tensor: torch.Tensor) -> list[int]:
    """The sums over a tensor's bits in row-major order, wherever in memory they lie: two of 64 bits."""
    return [signed(lane) for lane in lanes_of(tensor.detach().contiguous().view(-1).view(torch.uint8))]
