"""ZeRO-3 partitions by the meta route.

A parameter is never whole: a new one is made whose data is a single element expanded to the logical shape,
DeepSpeed attaches its machinery to it, the partition is allocated at partition size, and the placeholder is
freed. What ``deepspeed.initialize`` then finds is what ``zero.Init`` would have left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from zerostart.distributed.world import World
from zerostart.engines.deepspeed.settings import DeepSpeedSettings
from zerostart.engines.engine import ShardMaker
from zerostart.engines.placements import Placements
from zerostart.engines.shard import Shard, replace_everywhere
from zerostart.errors import EngineError
from zerostart.geometry.layout import Layout, flat_partition
from zerostart.transfer import Arena, page_locked
from zerostart.transfer.buffers import ALIGNMENT
from zerostart.transfer.rearrange import reorder
from zerostart.upstream.deepspeed import nvme
from zerostart.upstream.deepspeed import zero3_partitions as upstream
from zerostart.upstream.deepspeed.construction import restore_hooks
from zerostart.upstream.deepspeed.zero3_optimizer import Reader, mark, require_stage3
from zerostart.upstream.deepspeed.zero3_partitions import mark_leaves
from zerostart.upstream.types import DeepSpeedConfig

# Marks for the ZeRO-3 optimizer: mixtures of dtypes, and the reader of masters.


def check_mixture(parameters: Mapping[str, nn.Parameter], settings: DeepSpeedSettings) -> None:
    """Raise EngineError if a setting of DeepSpeed handles trainable parameters of one dtype only."""
    dtypes: dict[torch.dtype, str] = {}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            dtypes.setdefault(parameter.dtype, name)
    if len(dtypes) < 2:
        return
    require_stage3()
    for setting in settings.one_dtype:
        found = ", ".join(f"{name} is {str(d).removeprefix('torch.')}" for d, name in dtypes.items())
        raise EngineError(
            f"DeepSpeed's {setting} needs parameters of one dtype, but this model mixes them: {found}. "
            f"Leave {setting} out of engine_config['zero_optimization'], or use engine='fsdp2'"
        )


def mark_parameters(model: nn.Module, rounded: Collection[str], reader: Reader | None) -> None:
    """Mark all parameters, those named ``rounded`` with what reads their masters."""
    # An identity only: parameters with the same one are in the same buffers.
    load = object()
    for name, parameter in model.named_parameters():
        mark(parameter, name, reader if name in rounded else None, arrange, load)


# Reordering the partitions of a load within their buffer.


def arrange(groups: Sequence[Sequence[torch.Tensor]], other_tensors: Sequence[torch.Tensor]) -> None:
    """Place the 1-D tensors of ``groups`` one after another, in place.

    The target is the storage that most of them share; tensors from elsewhere are copied into it. ``others``
    may be in it as well, and move to its end. Does nothing without room, or if an unlisted tensor shares the
    storage.
    """
    grouped = [tensor for group in groups for tensor in group]
    storage = _home(grouped)
    if storage is None:
        return
    members = {id(t): t for t in (*grouped, *other_tensors) if _address(t) == storage.data_ptr()}
    targets: dict[int, int] = {}
    end, dtype = 0, None
    for tensor in grouped:
        # Groups of one dtype without a gap, as DeepSpeed wants a sub-group; another dtype begins aligned.
        start = end if tensor.dtype == dtype else end + -end % ALIGNMENT
        targets[id(tensor)] = start
        end, dtype = start + tensor.nbytes, tensor.dtype
    for tensor in members.values():
        if id(tensor) not in targets:
            targets[id(tensor)] = end + -end % ALIGNMENT
            end = targets[id(tensor)] + tensor.nbytes
    base = reorder(storage, [(tensor, targets[id(tensor)]) for tensor in members.values()], end)
    if base is None:
        return
    for tensor in (t for t in grouped if id(t) not in members):
        # After the move, when its place is free.
        place = targets[id(tensor)]
        new = base[place : place + tensor.nbytes].view(tensor.dtype)
        new.copy_(tensor)
        tensor.data = new


def _home(tensors: Sequence[torch.Tensor]) -> torch.UntypedStorage | None:
    """Return the storage with most bytes of the tensors, None if all are empty."""
    nbytes: dict[int, int] = {}
    storages = {}
    for tensor in tensors:
        storages[_address(tensor)] = tensor
        nbytes[_address(tensor)] = nbytes.get(_address(tensor), 0) + tensor.nbytes
    nbytes.pop(0, None)  # Tensors without data.
    return storages[max(nbytes, key=lambda at: nbytes[at])].untyped_storage() if nbytes else None


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


#: Name, parameter, this rank's layout, home of the partition and its place there.
Placed = tuple[str, nn.Parameter, Layout, upstream.Home, int]


class PartitionMaker(ShardMaker):
    """Makes ZeRO-3 partitions, wherever the configuration keeps them; see ``ShardMaker``.

    ``cut`` leaves this rank's experts or slices in a model, where ranks share them; ``owners`` are the ranks
    that partition each parameter, None for all.
    """

    def __init__(
        self,
        world: World,
        dtype: torch.dtype | None,
        config: DeepSpeedConfig | None,
        settings: DeepSpeedSettings,
        placements: Placements,
        cut: Callable[[nn.Module], None] | None,
        owners: dist.ProcessGroup | None = None,
    ) -> None:
        if settings.offload == "nvme":
            nvme.check_swapping()
        if settings.quantized_weights or settings.quantized_frozen_weights:
            upstream.check_quantising()
        self._world = world
        self._settings = settings
        self._placements = placements
        self._cut = cut
        dtype = dtype or settings.dtype
        with world.collectives("starting DeepSpeed"):
            upstream.join_group()
        if settings.secondary > 1:
            with world.collectives("making groups of hierarchical partitions"):
                upstream.join_hierarchical_groups(settings.secondary)
        self._init = upstream.partitioner(world.size, dtype, config, settings.secondary, owners)
        self._swapped: list[nn.Parameter] = []
        self.device = upstream.parameter_device(self._init)

    def shard(self, model: nn.Module, names: Sequence[str]) -> list[Shard]:
        """Replace each parameter by an empty ZeRO-3 parameter.

        Raises EngineError for a mixture of dtypes.
        """
        if self._cut is not None:
            self._cut(model)
        parameters = dict(model.named_parameters())
        self._check_frozen(parameters)
        check_mixture(parameters, self._settings)
        # Two passes: first all sizes, so that each home is one allocation, then the partitions in it.
        arenas: dict[upstream.Home, Arena] = {}
        placed: list[Placed] = []
        for name in names:
            layout = self._placements.layout(name, self._world.rank)
            # In the order of ``names``, the same on every rank.
            parameter = upstream.converted_parameter(self._init, parameters[name])
            home = upstream.home_of(self._init, parameter)
            place = 0
            if not home.nvme:
                arena = arenas.setdefault(home, Arena(home.device, page_locked if home.pinned else None))
                place = arena.reserve(layout.numel, parameter.dtype)
            placed.append((name, parameter, layout, home, place))
        if self._settings.offload == "cpu":
            _leave_room(arenas, placed)
        shards = []
        for name, parameter, layout, home, place in placed:
            if home.nvme:
                partition = nvme.swap_file(self._init, parameter, name, layout.numel)
                self._swapped.append(parameter)
            else:
                partition = arenas[home].take(place, layout.numel, parameter.dtype)
            upstream.give_partition(self._init, parameter, partition, home)
            at = functools.partial(self._placements.layout, name)
            shards.append(Shard(name, layout, partition, at))
        # All at once, for ties: every place of the old object gets the same new one.
        replace_everywhere(model, {id(parameters[name]): parameter for name, parameter, *_ in placed})
        if self._world.size > 1 and not self._settings.names_leaves:
            mark_leaves(expert_leaves(model))
        return shards

    def finish(self, model: nn.Module) -> int:
        """Write the partitions on NVMe to the device; all others are in place already.

        New parameters sum gradients that are partial on each rank.
        """
        if self._swapped:
            nvme.write_through(self._init, self._swapped)
        restore_hooks(model)
        return 0

    def _check_frozen(self, parameters: Mapping[str, nn.Parameter]) -> None:
        frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
        if frozen and self._settings.quantized_frozen_weights:
            raise EngineError(
                f"zero_quantized_nontrainable_weights would store {frozen[0]} and {len(frozen) - 1} more "
                "in 8 bits, and they would no longer equal the checkpoint; remove it from "
                "engine_config['zero_optimization']"
            )


def _leave_room(arenas: Mapping[upstream.Home, Arena], placed: Sequence[Placed]) -> None:
    """Reserve host memory for persistent trained parameters, which the optimizer moves there.

    They start on the accelerator. ``deepspeed.initialize`` puts all trained parameters into one host buffer:
    this one, if it has the room.
    """
    hosts = [arena for home, arena in arenas.items() if home.device.type == "cpu"]
    for _, parameter, layout, home, _ in placed:
        if hosts and home.device.type != "cpu" and parameter.requires_grad:
            hosts[0].reserve(layout.numel, parameter.dtype)


def holders_of(ranks: Sequence[int], world_size: int) -> tuple[int, int]:
    """Return the place of a partition group among all such groups, and their number.

    Groups are neighbours, or take every n-th rank. Raises EngineError for others.
    """
    size, first = len(ranks), ranks[0]
    count = world_size // size
    if list(ranks) == list(range(first, first + size)) and first % size == 0 and count * size == world_size:
        return first // size, count
    if list(ranks) == list(range(first, world_size, count)) and first < count:
        return first, count
    raise EngineError(
        f"a parameter is partitioned over the ranks {list(ranks)} of {world_size}, so the parts of "
        "the other ranks are unknown; use groups of neighbouring ranks"
    )


def current_shards(model: nn.Module) -> dict[str, Shard]:
    """Return the ZeRO-3 partitions of ``model`` as they are now."""
    shards = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        state = upstream.partition_of(parameter)
        if state is not None:
            partition, shape, rank, size = state
            at = functools.partial(flat_partition, tuple(shape), world_size=size)
            holders = (0, 1)
            if size < (world := dist.get_world_size()):
                # Other ranks have the same partition of replicas, or of other experts.
                holders = holders_of(upstream.partition_ranks(parameter), world)
            shards[name] = Shard(name, at(rank), partition, at, holders)
    return shards


# Experts that are separate modules. ZeRO-3 gathers a module's parameters when it runs, and reduces gradients
# as they come, on all ranks alike. If each expert is a module and runs only when a token reaches it, ranks
# whose tokens reach other experts would wait for each other forever. DeepSpeed's remedy is a leaf module: its
# parameters are gathered together when it runs, and unreached experts get gradients of zero.


def expert_leaves(model: nn.Module) -> list[nn.Module]:
    """List the modules that run one of several expert modules at a time.

    This is the container called ``experts`` if it runs itself, otherwise its parent.
    """
    leaves: dict[nn.Module, None] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            if "experts" in name and _several(child):
                runs = type(child).forward not in (nn.ModuleList.forward, nn.ModuleDict.forward)
                leaves[child if runs else parent] = None
    return list(leaves)


def _several(module: nn.Module) -> bool:
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)) or len(module) < 2:
        return False
    parts = list(module.children())
    return len({type(part) for part in parts}) == 1 and next(parts[0].parameters(), None) is not None
