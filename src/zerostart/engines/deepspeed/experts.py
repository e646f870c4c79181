"""Experts shared out by ranks on DeepSpeed: the experts modules cut to this rank's, and what is theirs later.

Every stage composes its shards with this: at stage 3 each expert is partitioned among its owners alone, at
stage 2 it lies in flat buffers of its own, over its owners.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from zerostart.distributed.world import World
from zerostart.engines.deepspeed.partitioning import current_shards
from zerostart.engines.deepspeed.settings import DeepSpeedSettings
from zerostart.engines.exchange import exchange_tokens, expert_modules
from zerostart.engines.flat_buffers import held_layouts
from zerostart.engines.shard import Shard, loaded_names
from zerostart.geometry.layout import Layout, Parallelism, flat_partition, replicated
from zerostart.upstream.deepspeed.construction import TensorGroups, note_shared
from zerostart.upstream.deepspeed.experts import (
    ExpertGroups,
    mark_expert,
    mark_flat_expert,
    require_groups,
)


def expert_cutter(world: World, parallelism: Parallelism, partitioned: bool) -> Callable[[nn.Module], None]:
    """What leaves this rank's experts in a model. Collective.

    ``partitioned``: experts are partitioned further, and not kept whole.
    """
    require_groups()
    size = parallelism.mesh.tensor_parallel
    with world.collectives("making the experts' groups"):
        groups = ExpertGroups(parallelism.mesh.expert_parallel)
        alike = TensorGroups(size).tensors if size > 1 else None
    # Stage 3 asks a parameter for its group, stages 1 and 2 for its group's name.
    marked = mark_expert if partitioned else mark_flat_expert
    return lambda model: _cut_experts(model, parallelism, world.rank, groups, alike, lambda p: marked(p, groups))


def _cut_experts(
    model: nn.Module,
    parallelism: Parallelism,
    rank: int,
    groups: ExpertGroups,
    alike: dist.ProcessGroup | None,
    mark: Callable[[nn.Parameter], None],
) -> None:
    """Leave this rank's experts in ``model`` (on meta), marked, and make them serve all ranks' tokens."""
    for module, own in expert_modules(model, parallelism).items():
        counts: list[int] = []
        for leaf, name in own.items():
            sections = parallelism.expert_sections(name)
            counts = [section.shape[0] for section in sections]
            here = sections[parallelism.mesh.expert(rank)[0]]
            local = _local(module._parameters[leaf], here.shape)
            mark(local)
            note_shared(local, groups.size)
            module._parameters[leaf] = local
        exchange_tokens(module, groups.experts, counts, parallelism.mesh.tensor_parallel, alike)


def _local(old: nn.Parameter | None, shape: tuple[int, ...]) -> nn.Parameter:
    assert old is not None, "a cut names a parameter that is there"
    data = torch.empty(shape, dtype=old.dtype, device="meta")
    new = nn.Parameter(data, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    return new


def expert_shards(model: nn.Module, parallelism: Parallelism, rank: int) -> dict[str, Shard]:
    """The ZeRO-3 partitions of ``model`` as they are now, with layouts of the unsharded parameters."""
    names = loaded_names(model)
    found = current_shards(model)
    for alias, shard in found.items():
        name = names[alias]  # A tied parameter lies as its first name says.
        if parallelism.is_expert(name) or parallelism.mesh.tensor_parallel > 1:
            at = functools.partial(_layout, parallelism, name)
            held = parallelism.holders(name, rank)
            found[alias] = Shard(name, at(rank), shard.storage, at, held, stepped=held)
    return found


def _layout(parallelism: Parallelism, name: str, rank: int) -> Layout:
    section = parallelism.section(name, parallelism.shapes[name], rank)
    return section.holds(flat_partition(section.shape, *parallelism.owners(name, rank)))


def flat_expert_shards(model: nn.Module, parallelism: Parallelism, rank: int) -> dict[str, Shard]:
    """The experts or slices of ``model`` on this rank, with layouts of the unsharded parameters."""
    found, mesh = {}, parallelism.mesh
    names = loaded_names(model)
    for alias, parameter in model.named_parameters(remove_duplicate=False):
        name = names[alias]
        if parallelism.cut(name) is not None:
            at = held_layouts(parallelism, name)
            held = parallelism.owners(name, rank)
            found[alias] = Shard(name, at(rank), parameter.detach().view(-1), at, held)
        elif mesh.tensor_parallel > 1:
            # Whole on every rank, but those that share tensors update the same part of it.
            at = functools.partial(_whole, tuple(parameter.shape))
            held = (rank, mesh.world_size)
            storage = parameter.detach().view(-1)
            found[alias] = Shard(name, at(rank), storage, at, held, stepped=mesh.tensor(rank))
    return found


def _whole(shape: tuple[int, ...], rank: int) -> Layout:
    return replicated(shape)


# This rank's part of what ranks share in a model: slices of tensors, then experts, one after the other.

#: Leaves this rank's part in a model, None where ranks share nothing; the ranks that partition each
#: parameter then, None for all.
Cutter = tuple[Callable[[nn.Module], None] | None, dist.ProcessGroup | None]


def cutter(world: World, settings: DeepSpeedSettings, parallelism: Parallelism, partitioned: bool) -> Cutter:
    """What leaves this rank's experts or slices in a model. Collective.

    ``partitioned``: they are partitioned further, and not kept whole.
    """
    from zerostart.engines.deepspeed.experts import expert_cutter
    from zerostart.engines.deepspeed.tensors import tensor_cutter

    cuts, owners = list[Callable[[nn.Module], None]](), None
    if parallelism.mesh.tensor_parallel > 1:
        cut, owners = tensor_cutter(world, parallelism, settings.tensors, settings.tp_plan)
        cuts.append(cut)
    if parallelism.mesh.expert_parallel > 1:
        # After the tensors: experts that are left out of their rules are still whole then.
        cuts.append(expert_cutter(world, parallelism, partitioned))
    return partial(_cut_all, cuts) if cuts else None, owners


def _cut_all(cuts: Sequence[Callable[[nn.Module], None]], model: nn.Module) -> None:
    for cut in cuts:
        cut(model)
