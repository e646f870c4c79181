"""Parameters that are whole on every rank, as views into one flat buffer for each dtype.

The buffers are what ZeRO stages 1 and 2 partition; at stage 0 nothing does. Each rank reads its part of a
buffer and they exchange the parts in place, or each reads all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import nn

from zerostart.engines.room import HOST, Tier, agree_on_tier
from zerostart.engines.shard import Shard, replace_everywhere
from zerostart.layout import replicated
from zerostart.layout.flat import FlatGroup, FlatRules
from zerostart.world import World, default_device

__all__ = ["ALIGNMENT", "Buffer", "WholeShards", "buffers_of", "exchanges", "gather_in_place"]

#: Bytes that a group, and a parameter, may begin at a multiple of.
ALIGNMENT = 64
#: Parameter groups for whose padding there is room.
GROUPS = 64
#: Bytes of a message when ranks exchange what they read.
MESSAGE = 32 << 20


def exchanges(exchange: bool | None, world_size: int) -> bool:
    """Whether each rank reads a share of the buffers and they exchange them, or each reads all.

    On the CPU a message is a copy through a socket, and slower than reading from the page cache.
    """
    if world_size == 1:
        return False
    return default_device().type != "cpu" if exchange is None else exchange


@dataclass(frozen=True)
class Buffer:
    """A flat buffer to be: the parameters ``names`` of ``dtype`` as ``group`` lays them out.

    ``own`` is true for experts of DeepSpeed's ``MoE`` (``param.allreduce`` is False): other ranks may hold
    other values of them, so that they are never exchanged.
    """

    dtype: torch.dtype
    own: bool
    names: tuple[str, ...]
    group: FlatGroup
    partitions: int

    @property
    def capacity(self) -> int:
        """Elements of the buffer, with room for the padding of other groupings."""
        step = ALIGNMENT // self.dtype.itemsize
        padding = len(self.group.numels) * step + GROUPS * (step + 2 * self.partitions)
        return self.group.numel + padding + -(self.group.numel + padding) % step

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.capacity * self.dtype.itemsize

    @property
    def received(self) -> int:
        """Bytes that a rank gets from the others when the buffer is exchanged."""
        size = self.partitions
        return 0 if self.own else (self.group.numel - self.group.numel // size) * self.dtype.itemsize


def buffers_of(parameters: Mapping[str, nn.Parameter], rules: FlatRules) -> list[Buffer]:
    """One buffer for each dtype, and for experts; what is trained comes first in it."""
    kinds: dict[tuple[torch.dtype, bool], list[str]] = {}
    for name, parameter in parameters.items():
        own = not getattr(parameter, "allreduce", True)
        kinds.setdefault((parameter.dtype, own), []).append(name)
    made = []
    for (dtype, own), names in kinds.items():
        names.sort(key=lambda name: not parameters[name].requires_grad)
        group = rules.group([prod(parameters[name].shape) for name in names], dtype.itemsize)
        made.append(Buffer(dtype, own, tuple(names), group, rules.partitions))
    return made


class WholeShards:
    """Makes the buffers, and the parameters in them.

    ``waits`` says whether the parameters may lie in host memory until the engine starts.
    """

    waits = False

    def __init__(self, world: World, zero_stage: int, rules: FlatRules, exchange: bool | None) -> None:
        self.device = default_device()
        self._world = world
        self._stage = zero_stage
        self._rules = rules
        self._exchange = exchanges(exchange, world.size)
        self._gathered: list[torch.Tensor] = []

    def settle(self, model: nn.Module, names: Sequence[str], alone: bool = False) -> Tier:
        """Agree where the buffers lie: collective, unless this process plays its rank ``alone``.

        Raises InsufficientMemoryError where there is no room for them.
        """
        nbytes = sum(buffer.nbytes for buffer in self._buffers(model, names))
        world = World(0, 1, None) if alone else self._world
        tier = agree_on_tier(nbytes, world, self.device, self._stage, self.waits)
        if tier.name == HOST:
            # Accelerators' collectives know no host memory.
            self.device, self._exchange = torch.device("cpu"), False
        return tier

    def _buffers(self, model: nn.Module, names: Sequence[str]) -> list[Buffer]:
        wanted = set(names)
        return buffers_of({n: p for n, p in model.named_parameters() if n in wanted}, self._rules)

    def shard(self, model: nn.Module, names: Sequence[str]) -> list[Shard]:
        """Give each parameter its place in a buffer; its shard is what this rank reads of it."""
        parameters = dict(model.named_parameters())
        new, made = {}, {}
        for buffer in self._buffers(model, names):
            flat = torch.empty(buffer.capacity, dtype=buffer.dtype, device=self.device)
            numel = buffer.group.numel
            for low, high in [*buffer.group.gaps(), (numel, flat.numel())]:
                flat[low:high].zero_()
            exchanged = self._exchange and not buffer.own
            if exchanged:
                self._gathered.append(flat[:numel])
            for place, (name, offset) in enumerate(zip(buffer.names, buffer.group.offsets, strict=True)):
                old = parameters[name]
                whole = flat[offset : offset + old.numel()]
                share = self._share if exchanged else self._all
                made[name] = share(name, buffer.group, place, old.shape, whole)
                new[id(old)] = self.born(old, whole, name)
        replace_everywhere(model, new)
        return [made[name] for name in names]

    def _all(
        self, name: str, group: FlatGroup, place: int, shape: Sequence[int], whole: torch.Tensor
    ) -> Shard:
        return Shard(name, replicated(shape), whole, lambda _: replicated(shape))

    def _share(
        self, name: str, group: FlatGroup, place: int, shape: Sequence[int], whole: torch.Tensor
    ) -> Shard:
        rank, size = self._world.rank, self._world.size
        at = group.share(place, shape, size)
        first = min(max(rank * (group.numel // size) - group.offsets[place], 0), whole.numel())
        return Shard(name, at(rank), whole[first : first + at(rank).numel], at)

    def born(self, old: nn.Parameter, whole: torch.Tensor, name: str) -> nn.Parameter:
        """The parameter ``old`` over the 1-D ``whole``, with its attributes."""
        new = nn.Parameter(whole.view(old.shape), requires_grad=old.requires_grad)
        new.__dict__.update(old.__dict__)
        return new

    def finish(self, model: nn.Module) -> int:
        """Exchange what the ranks have read, in place; returns the bytes that came from the others."""
        buffers, self._gathered = self._gathered, []
        for buffer in buffers:
            gather_in_place(buffer, self._world.rank, self._world.size)
        return sum(b.nbytes - b.nbytes // self._world.size for b in buffers)


def gather_in_place(buffer: torch.Tensor, rank: int, size: int, message: int = MESSAGE) -> None:
    """Fill the 1-D ``buffer`` of which each rank has its ``1 / size``, in messages of bounded size."""
    words = buffer.view(torch.uint8)  # Not every backend carries every dtype.
    share = words.numel() // size
    step = max(1, message // size)
    for start in range(0, share, step):
        count = min(step, share - start)
        parts = [words[r * share + start : r * share + start + count] for r in range(size)]
        dist.all_gather(parts, parts[rank])
