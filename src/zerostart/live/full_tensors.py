"""Whole tensors out of shards, one at a time."""

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

#: Elements of each rank's share that travel in one message.
MESSAGE = 1 << 22


def full_tensors(model: nn.Module, rank: int | None) -> Iterator[tuple[str, torch.Tensor | None]]:
    """See ``zerostart.full_tensors``; raises ConfigError when called, and not at the first step."""
    world = current_world()
    LiveModel(model, world).check_loaded()
    size = world.size
    if rank is not None and not 0 <= rank < size:
        raise ConfigError(f"rank={rank} is not one of the {size} ranks")
    # A generator runs nothing before its first step: the checks stand out here, so that a wrong argument
    # fails at the call.
    return _walk(model, rank)


def _walk(model: nn.Module, rank: int | None) -> Iterator[tuple[str, torch.Tensor | None]]:
    world = current_world()
    with world.phase(f"giving whole tensors to {_receiver(rank)}"):
        live = LiveModel(model, world)
        plain_names = live.plain_names
        for name, tensor, _ in state_names(live.module):
            shard, plain = live.sharded.get(id(tensor)), plain_names[name]
            if shard is not None and shard.held == (world.rank, world.size):
                # Every rank has the same share: all of it.
                tensor, shard = shard.storage.view(shard.layout.shape), None
            if shard is None:
                yield plain, tensor.detach().cpu().clone() if rank in (None, world.rank) else None
            else:
                yield plain, gather_tensor(shard, rank)


def _receiver(rank: int | None) -> str:
    return "all ranks" if rank is None else f"rank {rank}"


def gather_tensor(shard: Shard, rank: int | None) -> torch.Tensor | None:
    """One parameter, on ``rank`` or on all; every rank sends its share in messages of bounded size."""
    world = current_world()
    here, size = world.rank, world.size

    def prepare() -> tuple[list[Layout], torch.Tensor | None]:
        wanted = rank in (None, here)
        length, dtype = prod(shard.layout.shape), shard.storage.dtype
        out = torch.empty(length, dtype=dtype, device="cpu") if wanted else None
        return [shard.at(r) for r in range(size)], out

    # The place names the receiver: ranks that differ in it would wait for each other in what follows.
    with world.collectives(f"gathering {shard.name} on {_receiver(rank)}", prepare) as (layouts, out):
        longest = max(layout.numel for layout in layouts)
        # Every rank takes part in every round, also one whose share has ended: a collective that one rank
        # skips would hang the others. The longest share says how many rounds there are, which all ranks know
        # alike from the layouts.
        for start in range(0, longest, MESSAGE):
            count = min(MESSAGE, longest - start)
            parts = _exchange(_segment(shard.storage, start, count), rank, here, size)
            if out is None:
                continue
            # A round brings elements [start, start + count) of each rank's storage. A run says where elements
            # of the storage lie in the tensor: what both have in common is copied.
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
    """``part`` on a device that the process group's backend carries."""
    alone = not dist.is_initialized()
    if alone or part.device.type != "cpu" or "cpu" in str(dist.get_backend_config()):
        return part
    return part.to(default_device())


def _exchange(part: torch.Tensor, rank: int | None, here: int, size: int) -> list[torch.Tensor]:
    """``part`` of every rank, as CPU tensors, where they are wanted; [] elsewhere."""
    part = to_backend_device(part)
    # As bytes: not every backend carries every dtype.
    sent = part.view(torch.uint8)
    received = [torch.empty_like(sent) for _ in range(size)] if rank in (None, here) else []
    if size == 1:
        received = [sent]
    elif rank is None:
        dist.all_gather(received, sent)
    else:
        dist.gather(sent, received or None, dst=rank)
    return [r.view(part.dtype).cpu() for r in received]
