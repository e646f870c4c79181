"""Gather whole tensors from shards, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
import torch.distributed as dist
from torch import nn

from zerostart.distributed.world import current_world, default_device
from zerostart.engines import Shard
from zerostart.errors import ConfigError
from zerostart.geometry.layout import Layout
from zerostart.live.model import LiveModel
from zerostart.models import state_names

#: Elements that each rank sends in one message.
MESSAGE = 1 << 22


def full_tensors(model: nn.Module, rank: int | None) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Iterate over whole tensors; see ``zerostart.full_tensors``. Raises ConfigError at the call."""
    world = current_world()
    LiveModel(model, world).check_loaded()
    size = world.size
    if rank is not None and not 0 <= rank < size:
        raise ConfigError(f"rank={rank} is not one of the {size} ranks")
    # A generator would check the arguments only at its first step.
    return _walk(model, rank)


def _walk(model: nn.Module, rank: int | None) -> Iterator[tuple[str, torch.Tensor | None]]:
    world = current_world()
    with world.phase(f"giving whole tensors to {_receiver(rank)}"):
        live = LiveModel(model, world)
        plain_names = live.plain_names
        for name, tensor, _ in state_names(live.module):
            shard, plain = live.sharded.get(id(tensor)), plain_names[name]
            if shard is not None and shard.replica == (world.rank, world.size):
                # Every rank holds the whole tensor.
                tensor, shard = shard.storage.view(shard.layout.shape), None
            if shard is None:
                yield plain, tensor.detach().cpu().clone() if rank in (None, world.rank) else None
            else:
                yield plain, gather_tensor(shard, rank)


def _receiver(rank: int | None) -> str:
    return "all ranks" if rank is None else f"rank {rank}"


def gather_tensor(shard: Shard, rank: int | None) -> torch.Tensor | None:
    """Gather one parameter on ``rank`` or on all ranks, in messages of bounded size."""
    world = current_world()
    own_rank, size = world.rank, world.size

    def prepare() -> tuple[list[Layout], torch.Tensor | None]:
        receives = rank in (None, own_rank)
        length, dtype = prod(shard.layout.shape), shard.storage.dtype
        out = torch.empty(length, dtype=dtype, device="cpu") if receives else None
        return [shard.at(r) for r in range(size)], out

    # The name has the receiver, so that ranks with different arguments fail own_rank.
    with world.collectives(f"gathering {shard.name} on {_receiver(rank)}", prepare) as (layouts, out):
        longest = max(layout.numel for layout in layouts)
        # Every rank takes part in every round, also after its last element. All ranks compute the same number
        # of rounds from the longest shard.
        for start in range(0, longest, MESSAGE):
            count = min(MESSAGE, longest - start)
            parts = _exchange(_segment(shard.storage, start, count), rank, own_rank, size)
            if out is None:
                continue
            # The round has elements [start, start + count) of each rank's storage, and a run maps elements of
            # the storage to the tensor.
            for layout, part in zip(layouts, parts, strict=True):
                for first, length, place in layout.runs():
                    low, high = max(place, start), min(place + length, start + count)
                    if low < high:
                        out[first + low - place : first + high - place] = part[low - start : high - start]
    return None if out is None else out.view(shard.layout.shape)


def _segment(storage: torch.Tensor, start: int, count: int) -> torch.Tensor:
    part = storage[start : start + count]
    if part.numel() < count:
        part = torch.cat([part, part.new_zeros(count - part.numel())])
    return part.contiguous()


def to_backend_device(part: torch.Tensor) -> torch.Tensor:
    """Move ``part`` to a device that the process group's backend supports."""
    if not dist.is_initialized() or part.device.type != "cpu" or "cpu" in str(dist.get_backend_config()):
        return part
    return part.to(default_device())


def _exchange(part: torch.Tensor, rank: int | None, own_rank: int, size: int) -> list[torch.Tensor]:
    """Return the parts of all ranks as CPU tensors; [] if this rank receives none."""
    part = to_backend_device(part)
    # As bytes: not every backend supports every dtype.
    message = part.view(torch.uint8)
    received = [torch.empty_like(message) for _ in range(size)] if rank in (None, own_rank) else []
    if size == 1:
        received = [message]
    elif rank is None:
        dist.all_gather(received, message)
    else:
        dist.gather(message, received or None, dst=rank)
    return [r.view(part.dtype).cpu() for r in received]
