"""Which parameters are the same on all ranks, found without sending them.

What each rank did to a model since the load cannot be known from outside. So each hashes the bits of its
parameters, at the speed of memory, and the hashes are compared in one small message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

#: Words of 8 bytes that are hashed at a time: what the CPU's cache holds, and enough to keep others busy.
_WORDS, _MANY = 1 << 16, 1 << 20
#: Odd, as all factors here, so that no factor loses a bit: 2**64 over the golden ratio, and the like.
_STEP, _MIX = -7046029254386353131, -4417276706812531889


def alike(parameters: Sequence[torch.Tensor], group: Any) -> list[Any]:
    """Those that hold the same bits on all ranks of ``group``; collective, with one small message."""
    if not parameters or dist.get_world_size(group=group) == 1:
        return list(parameters)
    weights = place_weights(max(p.numel() * p.itemsize for p in parameters), parameters[0].device)
    own = torch.stack([fingerprint(parameter.detach(), weights) for parameter in parameters])
    extremes = torch.stack([own, ~own])  # ~ reverses the order: the least of it is the greatest.
    dist.all_reduce(extremes, op=dist.ReduceOp.MIN, group=group)
    same = (extremes[0] == ~extremes[1]).tolist()
    return [parameter for parameter, one in zip(parameters, same, strict=True) if one]


def fingerprint(tensor: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """A 64-bit hash of a tensor's bits in row-major order, wherever in memory they lie: an integer, [].

    ``weights`` are ``place_weights`` for at least as many bytes.

    Words of 8 bytes, each weighted by its place, are summed up, chunk after chunk as in a polynomial; and so
    are their upper halves, whose products would lose most bits otherwise. Any difference shows, elements that
    changed places included, but for one case in some 2**47.
    """
    data = tensor.contiguous().view(-1).view(torch.uint8)
    found = torch.zeros((), dtype=torch.int64, device=data.device)
    upper = torch.empty_like(weights)
    step = 8 * _chunk(data.device)
    for start in range(0, data.numel(), step):
        words = _words(data[start : start + step])
        count = words.numel()
        torch.bitwise_right_shift(words, 32, out=upper[:count])
        both = _weighted(words, weights[:count]) + _MIX * _weighted(upper[:count], weights[:count])
        found = found * _STEP + both
    return found


def _weighted(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sum of the words, each times its weight."""
    if words.device.type == "cpu":
        return torch.dot(words, weights)  # At the speed of memory; accelerators have it for floats alone.
    return (words * weights).sum()


def _words(data: torch.Tensor) -> torch.Tensor:
    """Bytes as 64-bit words, the last one filled up with zeros."""
    rest = -data.numel() % 8
    if rest:
        data = torch.cat([data, data.new_zeros(rest)])
    elif data.storage_offset() % 8:
        data = data.clone()
    return data.view(torch.int64)


def _chunk(device: torch.device) -> int:
    return _WORDS if device.type == "cpu" else _MANY


def place_weights(nbytes: int, device: torch.device) -> torch.Tensor:
    """Odd 64-bit numbers without a pattern, the same everywhere (as the finaliser of SplitMix64 mixes)."""
    count = min(_chunk(device), -(-nbytes // 8))
    mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _STEP
    mixed = (mixed ^ (mixed >> 30)) * _MIX
    mixed = (mixed ^ (mixed >> 27)) * _STEP
    return (mixed ^ (mixed >> 31)) | 1
