"""One whole parameter out of shards, to look at or to change."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from difflib import get_close_matches

import torch
import torch.distributed as dist
from torch import nn

from zerostart.distributed.world import World, current_world
from zerostart.engines import Shard
from zerostart.errors import ConfigError
from zerostart.loading.record import loaded_model, record_of
from zerostart.state.full_tensors import MESSAGE, whole_tensor
from zerostart.upstream.deepspeed_editing import partition_changed

__all__ = ["gathered"]


@contextlib.contextmanager
def gathered(model: nn.Module, name: str, modifier_rank: int | None) -> Iterator[torch.Tensor]:
    """See ``zerostart.gathered``."""
    inner = loaded_model(model)
    record = record_of(inner)
    world = current_world()
    if modifier_rank is not None and not 0 <= modifier_rank < world.size:
        raise ConfigError(f"modifier_rank={modifier_rank} is not one of the {world.size} ranks")
    with world.phase(f"changing {name}"):
        shard = record.shards(inner).get(name)
        if shard is None:
            raise _unknown(inner, name)
        whole = whole_tensor(shard, None)
        assert whole is not None, "every rank asked for it"
        before = _fingerprint(whole)
        yield whole
        changed = _fingerprint(whole) != before and world.rank != modifier_rank
        others = [r for r, was in enumerate(world.all_gather_object(changed, "looking for changes")) if was]
        if others:
            raise ConfigError(
                f"{name} was changed on {_ranks(others)}, which would be lost: the shards are as they were. "
                "Pass modifier_rank= with the rank whose changes are to count, and change the tensor there "
                "alone"
            )
        if modifier_rank is not None:
            _write_back(shard, whole, world, modifier_rank)
            partition_changed(inner.get_parameter(name))


def _write_back(shard: Shard, whole: torch.Tensor, world: World, source: int) -> None:
    """Each rank takes its elements out of what rank ``source`` sends, in messages of bounded size."""
    flat = whole.detach().reshape(-1)
    runs = shard.layout.runs()
    device = shard.storage.device
    with torch.no_grad(), world.collectives("sending what was changed"):
        for start in range(0, flat.numel(), MESSAGE):
            part = flat[start : start + MESSAGE].to(device).contiguous()
            if world.size > 1:
                # As bytes: not every backend carries every dtype.
                dist.broadcast(part.view(torch.uint8), src=source)
            for first, length, place in runs:
                low, high = max(first, start), min(first + length, start + part.numel())
                if low < high:
                    shard.storage[place + low - first : place + high - first] = part[
                        low - start : high - start
                    ]


def _fingerprint(tensor: torch.Tensor) -> int:
    """A checksum of the bytes: a change through a view, ``.data`` or NumPy shows as well."""
    return zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _unknown(model: nn.Module, name: str) -> ConfigError:
    names = [n for n, _ in model.named_parameters(remove_duplicate=False)]
    close = get_close_matches(name, names, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return ConfigError(f"{type(model).__name__} has no sharded parameter {name}{hint}")


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
