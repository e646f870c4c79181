"""Whole parameters as views into one flat buffer for each dtype.

ZeRO stages 1 and 2 partition the buffers; stage 0 does not. Each rank reads its part of a buffer and the
ranks exchange the parts in place, or each rank reads everything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import lcm, prod

import torch
import torch.distributed as dist
from torch import nn

from zerostart.distributed.world import World, default_device
from zerostart.engines.placements import DEVICE, RANKS_OF_A_MACHINE, Parameters, Placements
from zerostart.engines.residence import HOST, MemoryFit, Residence, agree_on_residence, residence_of
from zerostart.engines.shard import Shard, replace_everywhere
from zerostart.geometry.layout import Layout, Parallelism, replicated
from zerostart.geometry.layout.layout import FlatGroup, FlatRules

#: Alignment of groups and parameters in bytes.
ALIGNMENT = 64
#: Number of optimizer parameter groups for which a buffer has room for padding.
GROUPS = 64
#: Maximum size of one message when ranks exchange their parts, in bytes.
MESSAGE = 32 << 20


def exchanges(exchange: bool | None, world_size: int) -> bool:
    """Return True if ranks read shares of the buffers and exchange them.

    By default False on the CPU, where messages pass through a socket, which is slower than the page cache.
    """
    if world_size == 1:
        return False
    return default_device().type != "cpu" if exchange is None else exchange


@dataclass(frozen=True)
class ParameterSet:
    """Parameters that share buffers, since the same ranks partition their optimizer state."""

    parameters: Mapping[str, nn.Parameter]
    rules: FlatRules
    #: True if ranks read shares of the buffers and exchange them.
    exchange: bool
    #: Functions from a rank to the layout of each split parameter, by name; others are whole on every rank.
    layouts: Mapping[str, Callable[[int], Layout]] = field(default_factory=dict)


@dataclass(frozen=True)
class Buffer:
    """Flat buffer that is not yet allocated."""

    members: ParameterSet
    dtype: torch.dtype
    #: Parameters of ``dtype`` of the set, in their order in the buffer.
    names: tuple[str, ...]
    #: Offsets of the parameters in the buffer.
    group: FlatGroup

    @property
    def capacity(self) -> int:
        """Number of elements of the buffer, padding included."""
        # The optimizer may form other groups: leave room to align the start of each parameter and the end of
        # each group.
        step, partitions = ALIGNMENT // self.dtype.itemsize, self.members.rules.partitions
        padding = len(self.group.numels) * step + GROUPS * (step + 2 * partitions)
        return self.group.numel + padding + -(self.group.numel + padding) % step

    @property
    def nbytes(self) -> int:
        """Size of the buffer in bytes."""
        return self.capacity * self.dtype.itemsize

    @property
    def received(self) -> int:
        """Bytes that a rank receives when ranks exchange the buffer."""
        if not self.members.exchange:
            return 0
        return (self.group.numel - self.group.numel // self.members.rules.partitions) * self.dtype.itemsize


def find_parameter_sets(
    parameters: Mapping[str, nn.Parameter],
    rules: FlatRules,
    exchange: bool,
    parallelism: Parallelism,
    rank: int,
) -> list[ParameterSet]:
    """Group the parameters of ``rank`` by the ranks that partition their optimizer state.

    Expert-parallel parameters are one set. Those of DeepSpeed's ``MoE`` (``param.allreduce`` is False) are
    another, since values differ between ranks. Neither is exchanged, and with tensor parallelism nothing is.
    A parameter that is not yet split is replaced by one on meta in its final shape.
    """
    tensors = parallelism.tensors.cuts
    experts = {
        name: _cut(name, p, parallelism, rank)
        for name, p in parameters.items()
        if parallelism.is_expert(name)
    }
    # DeepSpeed's MoE sets ``allreduce`` to False on parameters that differ between ranks.
    own = {
        name: p for name, p in parameters.items() if name not in experts and not getattr(p, "allreduce", True)
    }
    dense = {
        name: _cut(name, p, parallelism, rank) if name in tensors else p
        for name, p in parameters.items()
        if name not in own and name not in experts
    }
    slices = {name: held_layouts(parallelism, name) for name in dense if name in tensors}
    shared = exchange and not slices
    sets = [ParameterSet(dense, rules, shared, slices), ParameterSet(own, rules, False)]
    if experts:
        layouts = {name: held_layouts(parallelism, name) for name in experts}
        # Only these ranks have the same experts, so they partition the optimizer state.
        owners = parallelism.mesh.expert_data(rank)[1]
        sets.append(ParameterSet(experts, replace(rules, partitions=owners), False, layouts))
    return sets


def _cut(name: str, parameter: nn.Parameter, parallelism: Parallelism, rank: int) -> nn.Parameter:
    shape = parallelism.section(name, parallelism.shapes[name], rank).shape
    if tuple(parameter.shape) == shape:
        return parameter
    data = torch.empty(shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(data, requires_grad=parameter.requires_grad)


def held_layouts(parallelism: Parallelism, name: str) -> Callable[[int], Layout]:
    """Return a function from a rank to its layout of a split parameter."""
    return functools.partial(_held_layout, parallelism, name)


def _held_layout(parallelism: Parallelism, name: str, rank: int) -> Layout:
    section = parallelism.section(name, parallelism.shapes[name], rank)
    return section.expand(replicated(section.shape))


def buffers_of(sets: Sequence[ParameterSet]) -> list[Buffer]:
    """Make one buffer for each set and dtype; trained parameters come first."""
    buffers = []
    for members in sets:
        parameters = members.parameters
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters.values()):
            names = [name for name, p in parameters.items() if p.dtype == dtype]
            # The optimizer needs trained parameters in one range. The sort is stable: it keeps the model's
            # order otherwise.
            names.sort(key=lambda name: not parameters[name].requires_grad)
            numels = [prod(parameters[name].shape) for name in names]
            buffers.append(Buffer(members, dtype, tuple(names), members.rules.group(numels, dtype.itemsize)))
    return buffers


def whole_placements(
    parameters: Parameters,
    parallelism: Parallelism,
    rules: FlatRules,
    exchange: bool | None,
    waits: bool,
    zero_stage: int,
) -> Placements:
    """Return placements in flat buffers.

    ``waits``: the buffers may be in host memory until the engine starts.
    """
    size = rules.partitions
    # Rank 0 has as many experts as any rank.
    sets = find_parameter_sets(parameters, rules, exchanges(exchange, size), parallelism, 0)
    buffers = buffers_of(sets)
    nbytes = sum(buffer.nbytes for buffer in buffers)
    fit = MemoryFit.here(default_device())
    # Ranks of a machine share one host memory; each accelerator has its own.
    fits = [fit] * (min(size, RANKS_OF_A_MACHINE) if fit.on_host else 1)
    parts: dict[str, Callable[[int], Layout]] = {}
    exchanged = [buffer for buffer in buffers if buffer.members.exchange]
    for buffer in exchanged:
        for place, name in enumerate(buffer.names):
            parts[name] = buffer.group.share(place, parameters[name].shape, size)
    layouts = {name: at for members in sets for name, at in members.layouts.items()}
    runs, mesh = {**parts, **layouts}, parallelism.mesh

    def alike(name: str) -> Hashable:
        return ("cut", parallelism.cut(name)) if name in layouts else name if name in parts else None

    def twin(rank: int) -> int:
        # Ranks read different shares with an exchange; otherwise only cut parameters differ.
        return rank if parts else rank % lcm(mesh.expert_parallel, mesh.tensor_parallel) if layouts else 0

    return Placements(
        layout=lambda name, rank: runs[name](rank) if name in runs else replicated(parameters[name].shape),
        alike=alike,
        twin=twin,
        homes=dict.fromkeys(parameters, DEVICE),
        resident_bytes=nbytes,
        gathered=sum(buffer.received for buffer in exchanged),
        residence=residence_of(nbytes, fits, waits, zero_stage > 0),
    )


class FlatBufferShards:
    """Allocator of flat buffers and of the parameters that are views of them.

    ``waits`` is True if the parameters may be in host memory until the engine starts.
    """

    waits = False

    def __init__(
        self,
        world: World,
        zero_stage: int,
        rules: FlatRules,
        exchange: bool | None,
        parallelism: Parallelism,
    ) -> None:
        self.device = default_device()
        self._world = world
        self._stage = zero_stage
        self._rules = rules
        self._parallelism = parallelism
        self._exchange = exchanges(exchange, world.size)
        self._gathered: list[torch.Tensor] = []

    def agree_on_residence(self, model: nn.Module, names: Sequence[str]) -> Residence:
        """Agree on the device of the buffers; collective. Raises InsufficientMemoryError if none has room."""
        nbytes = sum(buffer.nbytes for buffer in self._buffers(model, names))
        residence = agree_on_residence(nbytes, self._world, self.device, self._stage, self.waits)
        if residence.name == HOST:
            # Collectives of accelerators cannot use host memory.
            self.device, self._exchange = torch.device("cpu"), False
        return residence

    def _buffers(self, model: nn.Module, names: Sequence[str]) -> list[Buffer]:
        included = set(names)
        parameters = {n: p for n, p in model.named_parameters() if n in included}
        options = self._rules, self._exchange, self._parallelism, self._world.rank
        return buffers_of(find_parameter_sets(parameters, *options))

    def shard(self, model: nn.Module, names: Sequence[str]) -> list[Shard]:
        """Move each parameter into a buffer; return the shards that this rank reads."""
        new, made = {}, {}
        for buffer in self._buffers(model, names):
            # The checkpoint fills the parameters. Only gaps and the end are zeroed, since sums include them.
            flat = torch.empty(buffer.capacity, dtype=buffer.dtype, device=self.device)
            numel = buffer.group.numel
            for low, high in [*buffer.group.gaps(), (numel, flat.numel())]:
                flat[low:high].zero_()
            if buffer.members.exchange:
                self._gathered.append(flat[:numel])
            for place, (name, offset) in enumerate(zip(buffer.names, buffer.group.offsets, strict=True)):
                old = buffer.members.parameters[name]
                whole = flat[offset : offset + old.numel()]
                made[name] = self._shard(name, buffer, place, whole)
                new[id(old)] = self.make_parameter(old, whole, name, buffer.members)
        replace_everywhere(model, new)
        return [made[name] for name in names]

    def _shard(self, name: str, buffer: Buffer, place: int, whole: torch.Tensor) -> Shard:
        members, group = buffer.members, buffer.group
        shape = tuple(members.parameters[name].shape)
        rank, size = self._world.rank, self._world.size
        if not members.exchange:
            layout = members.layouts.get(name) or (lambda _: replicated(shape))
            return Shard(name, layout(rank), whole, layout)
        at = group.share(place, shape, size)
        # Start of this rank's share of the buffer within the parameter, clamped to it.
        first = min(max(rank * (group.numel // size) - group.offsets[place], 0), whole.numel())
        part = whole[first : first + at(rank).numel]
        return Shard(name, at(rank), part, at, local=replicated(shape))

    def make_parameter(
        self, old: nn.Parameter, whole: torch.Tensor, name: str, members: ParameterSet
    ) -> nn.Parameter:
        """Return ``old`` with the 1-D ``whole`` as its memory."""
        # ``detach`` would share the version of all parameters of the buffer: autograd would take a change of
        # one (PEFT's parametrizations) for a change of the others.
        view, data = whole.view(old.shape), torch.empty(0, dtype=whole.dtype, device=whole.device)
        data.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())
        new = nn.Parameter(data, requires_grad=old.requires_grad)
        new.__dict__.update(old.__dict__)
        return new

    def finish(self, model: nn.Module) -> int:
        """Exchange the parts that ranks have read, in place; return the received bytes."""
        # Drop the references first, so that buffers are freed with their parameters.
        buffers, self._gathered = self._gathered, []
        if buffers:
            with self._world.collectives("gathering the flat buffers"):
                for buffer in buffers:
                    gather_in_place(buffer, self._world.rank, self._world.size)
        return sum(b.nbytes - b.nbytes // self._world.size for b in buffers)


def gather_in_place(buffer: torch.Tensor, rank: int, size: int, message: int = MESSAGE) -> None:
    """Fill the 1-D ``buffer`` from equal parts on all ranks, in messages of bounded size."""
    words = buffer.view(torch.uint8)  # not every backend can send every dtype
    # Padding makes the size a multiple of the number of ranks.
    share = words.numel() // size
    step = max(1, message // size)
    for start in range(0, share, step):
        count = min(step, share - start)
        # Receive into views of the buffer, without additional memory.
        parts = [words[r * share + start : r * share + start + count] for r in range(size)]
        dist.all_gather(parts, parts[rank])
