"""ZeRO stages 1 and 2: parameters are views into flat buffers, which the optimizer takes as its own.

A load knows the order in which DeepSpeed flattens parameters that are all trained, in one group: so they
lie from the start. Where the optimizer turns out to have other groups (weight decay or not, frozen
parameters), they are reordered within the buffer, with a bounded amount of memory beside it.
"""

from __future__ import annotations

import itertools
import logging
import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerostart.engines.shard import Shard, replace_everywhere
from zerostart.errors import ConfigError, EngineError
from zerostart.layout import Layout, replicated
from zerostart.layout.flat import FlatGroup, FlatRules
from zerostart.transfer.memory import free_bytes
from zerostart.transfer.rearrange import Segment, in_place, rearrange
from zerostart.upstream import deepspeed_stage12 as upstream
from zerostart.upstream.torch import storage_users
from zerostart.world import World, default_device

__all__ = [
    "Family",
    "FlatKeeper",
    "FlatShards",
    "capacity",
    "check_stage",
    "exchanges",
    "flat_groups",
    "flat_rules",
    "offer_runs",
]

logger = logging.getLogger("zerostart")

#: Bytes that a group, and a parameter, may begin at a multiple of.
ALIGNMENT = 64
#: Parameter groups for whose padding there is room.
GROUPS = 64
#: Bytes of a message when ranks exchange what they read.
MESSAGE = 32 << 20


def check_stage(zero_stage: int, config: Mapping[str, Any] | None, parallel: bool) -> None:
    """Raise for a configuration of another stage, and for what stages 1 and 2 do not serve."""
    if parallel and zero_stage < 2:
        raise ConfigError(
            f"expert_parallel with zero_stage={zero_stage} is not available: DeepSpeed reduces gradients of "
            "experts at stages 2 and 3; use one of these, or engine='fsdp2'"
        )
    zero = (config or {}).get("zero_optimization") or {}
    for key in ("contiguous_gradients", "reduce_scatter"):
        if parallel and zero_stage < 3 and zero.get(key, True) is False:
            raise ConfigError(
                f"DeepSpeed reduces gradients of experts at stage 2 with {key} alone; leave it out of "
                "engine_config['zero_optimization'], or use zero_stage=3"
            )
    stage = zero.get("stage", zero_stage)
    if stage != zero_stage:
        raise EngineError(f"engine_config asks for ZeRO stage {stage}, and the load for stage {zero_stage}")


def exchanges(exchange: bool | None, world_size: int) -> bool:
    """Whether each rank reads a share of the buffer and they exchange them, or each reads all of it.

    On the CPU a message is a copy through a socket, and slower than reading from the page cache.
    """
    if world_size == 1:
        return False
    return default_device().type != "cpu" if exchange is None else exchange


def flat_rules(config: Mapping[str, Any] | None, zero_stage: int, partitions: int) -> FlatRules:
    """How the optimizer that the configuration asks for flattens; a guess where it says too little."""
    zero = (config or {}).get("zero_optimization") or {}
    accumulated = ((config or {}).get("data_types") or {}).get("grad_accum_dtype")
    offloaded = ((zero.get("offload_optimizer") or {}).get("device") or "none") != "none"
    # BF16_Optimizer knows neither option.
    plain = zero_stage == 1 and accumulated in ("fp32", "float32") and not offloaded
    return FlatRules(
        partitions,
        round_robin=zero.get("round_robin_gradients") is True and not plain,
        aligned=zero.get("parameter_alignment") is True and not plain,
    )


def flat_groups(
    parameters: Mapping[str, nn.Parameter], rules: FlatRules
) -> dict[torch.dtype, tuple[list[str], FlatGroup]]:
    """The names of each dtype's parameters, what is trained first, and where they lie in their buffer."""
    found = {}
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters.values()):
        names = [name for name, p in parameters.items() if p.dtype == dtype]
        names.sort(key=lambda name: not parameters[name].requires_grad)
        found[dtype] = (names, rules.group([parameters[name].numel() for name in names], dtype.itemsize))
    return found


def capacity(group: FlatGroup, partitions: int, itemsize: int) -> int:
    """Elements of a group's buffer, with room for the padding of other groupings."""
    step = ALIGNMENT // itemsize
    padding = len(group.numels) * step + GROUPS * (step + 2 * partitions)
    return group.numel + padding + -(group.numel + padding) % step


class FlatKeeper:
    """Knows the parameters of one load, and brings them into the order that an optimizer wants."""

    def __init__(self) -> None:
        self._parameters: list[weakref.ref[nn.Parameter]] = []

    def add(self, parameter: nn.Parameter) -> None:
        """A parameter that lies in one of the load's buffers."""
        self._parameters.append(weakref.ref(parameter))

    def adopt(
        self,
        groups: Sequence[Sequence[torch.Tensor]],
        partitions: Sequence[int],
        round_robin: bool,
        aligned: bool,
    ) -> list[torch.Tensor | None]:
        """See ``zerostart.upstream.deepspeed_stage12.Keeper``. Parameters that have left are left alone."""
        rules = [FlatRules(count, round_robin, aligned) for count in partitions]
        flats: list[torch.Tensor | None] = [None] * len(groups)
        alive = [p for p in (reference() for reference in self._parameters) if p is not None]
        buffers: dict[tuple[int, torch.dtype], list[nn.Parameter]] = {}
        for parameter in alive:
            if parameter.is_contiguous():
                place = (parameter.untyped_storage().data_ptr(), parameter.dtype)
                buffers.setdefault(place, []).append(parameter)
        for members in buffers.values():
            here = {id(parameter) for parameter in members}
            wholly = [n for n, group in enumerate(groups) if group and here.issuperset(map(id, group))]
            if wholly:
                taken = _arrange(members, [(groups[n], rules[n]) for n in wholly])
                for number, flat in zip(wholly, taken, strict=False):
                    flats[number] = flat
        return flats


def _arrange(
    members: Sequence[nn.Parameter], groups: Sequence[tuple[Sequence[torch.Tensor], FlatRules]]
) -> list[torch.Tensor]:
    """Bring the parameters of one buffer into groups, in place; [] where that cannot be done."""
    first = members[0]
    storage, dtype = first.untyped_storage(), first.dtype
    room, step = storage.nbytes() // dtype.itemsize, max(1, ALIGNMENT // dtype.itemsize)
    targets: dict[int, int] = {}
    made: list[tuple[int, FlatGroup]] = []
    end = 0
    for group, rules in groups:
        start = end + -end % step
        flat = rules.group([p.numel() for p in group], dtype.itemsize)
        targets |= {id(p): start + offset for p, offset in zip(group, flat.offsets, strict=True)}
        made.append((start, flat))
        end = start + flat.numel
    for parameter in members:
        if id(parameter) not in targets:
            targets[id(parameter)] = end + -end % step
            end = targets[id(parameter)] + parameter.numel()
    segments = [(int(p.storage_offset()), targets[id(p)], p.numel()) for p in members]
    if end > room or _overlapping(segments):
        return []
    base = torch.empty(0, dtype=dtype, device=first.device).set_(storage, 0, (room,), (1,))
    if not in_place(segments):
        # The parameters, the buffer as a whole, and the handle of the storage.
        if storage_users(storage) > len(members) + 2:
            logger.warning(
                "tensors other than the model's parameters share their memory (a state dict, or views that "
                "were kept): the parameters are not reordered within it, but copied; drop such tensors "
                "before deepspeed.initialize"
            )
            return []
        with torch.no_grad():
            rearrange(base, segments)
        for parameter in members:
            place = targets[id(parameter)]
            parameter.data = base[place : place + parameter.numel()].view(parameter.shape)
    flats = []
    for start, flat in made:
        whole = base[start : start + flat.numel]
        for low, high in flat.gaps():
            whole[low:high].zero_()
        flats.append(whole)
    return flats


def _overlapping(segments: Sequence[Segment]) -> bool:
    """Whether two parameters share elements, which then cannot both be moved."""
    ordered = sorted(segments)
    return any(a[0] + a[2] > b[0] for a, b in itertools.pairwise(ordered))


@dataclass(frozen=True)
class Family:
    """Parameters that lie in the same buffers, since the same ranks partition their optimizer state.

    ``held`` has, by name, the layout of what any rank holds of a parameter, and the first element of its
    row-major order that this rank holds; a parameter that is not there is whole on every rank.
    """

    parameters: Mapping[str, nn.Parameter]
    rules: FlatRules
    exchange: bool
    held: Mapping[str, tuple[Callable[[int], Layout], int]] = field(default_factory=dict)


class FlatShards:
    """Makes parameters that are whole on every rank, in one flat buffer for each dtype."""

    def __init__(
        self,
        world: World,
        zero_stage: int,
        engine_config: Mapping[str, Any] | None,
        exchange: bool | None = None,
    ) -> None:
        check_stage(zero_stage, engine_config, False)
        upstream.require_engine()
        self.device = default_device()
        self._world = world
        self._stage = zero_stage
        self._rules = flat_rules(engine_config, zero_stage, world.size)
        self._exchange = exchanges(exchange, world.size)
        self._buffers: list[torch.Tensor] = []

    def shard(self, model: nn.Module, names: Sequence[str]) -> list[Shard]:
        """Give each parameter its place in a buffer; its shard is what this rank reads of it."""
        families = [
            (family, flat_groups(family.parameters, family.rules))
            for family in self._families({n: p for n, p in model.named_parameters() if n in set(names)})
        ]
        sizes = [
            {dtype: capacity(g, family.rules.partitions, dtype.itemsize) for dtype, (_, g) in groups.items()}
            for family, groups in families
        ]
        self._check_room(sum(n * dtype.itemsize for each in sizes for dtype, n in each.items()))
        keeper, new, made = FlatKeeper(), {}, {}
        for (family, groups), size in zip(families, sizes, strict=True):
            for dtype, (members, group) in groups.items():
                buffer = torch.empty(size[dtype], dtype=dtype, device=self.device)
                for low, high in [*group.gaps(), (group.numel, buffer.numel())]:
                    buffer[low:high].zero_()
                if family.exchange:
                    self._buffers.append(buffer[: group.numel])
                for place, (name, offset) in enumerate(zip(members, group.offsets, strict=True)):
                    old = family.parameters[name]
                    whole = buffer[offset : offset + old.numel()]
                    made[name] = self._shard(name, family, group, place, whole)
                    new[id(old)] = self._parameter(old, whole, name, keeper, family)
        replace_everywhere(model, new)
        return [made[name] for name in names]

    def _families(self, parameters: Mapping[str, nn.Parameter]) -> list[Family]:
        return [Family(parameters, self._rules, self._exchange)]

    def _shard(self, name: str, family: Family, group: FlatGroup, place: int, whole: torch.Tensor) -> Shard:
        shape = family.parameters[name].shape
        rank, size = self._world.rank, self._world.size
        if not family.exchange:
            held = family.held[name][0] if name in family.held else lambda _: replicated(shape)
            return Shard(name, held(rank), whole, held)
        at = group.share(place, shape, size)
        part = group.numel // size
        offset = group.offsets[place]
        first = min(max(rank * part - offset, 0), whole.numel())
        return Shard(name, at(rank), whole[first : first + at(rank).numel], at)

    def _parameter(
        self, old: nn.Parameter, whole: torch.Tensor, name: str, keeper: FlatKeeper, family: Family
    ) -> nn.Parameter:
        new = nn.Parameter(whole.view(old.shape), requires_grad=old.requires_grad)
        new.__dict__.update(old.__dict__)
        keeper.add(new)
        upstream.mark(new, name, keeper, family.held[name][1] if name in family.held else 0)
        return new

    def _check_room(self, nbytes: int) -> None:
        """Refuse a model that cannot fit, before anything is read."""
        ranks = 1
        if self.device.type == "cpu":
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)
        free = free_bytes(self.device)
        if free is not None and nbytes * ranks > free:
            raise EngineError(
                f"ZeRO stage {self._stage} keeps the whole model on every rank: {nbytes / 2**30:.2f} GiB "
                f"for each of {ranks} ranks on {self.device}, where {free / 2**30:.2f} GiB are free; use "
                "zero_stage=3, which shards it"
            )

    def finish(self, model: nn.Module) -> int:
        """Exchange what the ranks have read, in place; returns the bytes that came from the others."""
        buffers, self._buffers = self._buffers, []
        if not self._exchange:
            return 0
        for buffer in buffers:
            gather_in_place(buffer, self._world.rank, self._world.size)
        return sum(b.nbytes - b.nbytes // self._world.size for b in buffers)


def offer_runs(model: nn.Module, rounded: Collection[str], reader: upstream.RunReader) -> None:
    """Let the optimizer read the fp32 masters of the parameters ``rounded`` when it makes them."""
    for name, parameter in model.named_parameters():
        if name in rounded:
            upstream.offer(parameter, reader)


def gather_in_place(buffer: torch.Tensor, rank: int, size: int, message: int = MESSAGE) -> None:
    """Fill the 1-D ``buffer`` of which each rank has its ``1 / size``, in messages of bounded size."""
    words = buffer.view(torch.uint8)  # Not every backend carries every dtype.
    share = words.numel() // size
    step = max(1, message // size)
    for start in range(0, share, step):
        count = min(step, share - start)
        parts = [words[r * share + start : r * share + start + count] for r in range(size)]
        dist.all_gather(parts, parts[rank])
