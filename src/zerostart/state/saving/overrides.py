"""Saving other values than those of the parameters: fp32 masters, or averages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from zerostart.distributed.world import World
from zerostart.engines import Shard
from zerostart.geometry.layout import Layout
from zerostart.state.resuming.optimizer import masters_of
from zerostart.state.resuming.training_state import training_of
from zerostart.state.saving.contents import Held


@dataclass(frozen=True)
class Instead:
    """Values that stand for those of parameters, by their first names: this rank's share of each.

    ``ties`` has the first name of every other one.
    """

    shards: Mapping[str, Shard]
    ties: Mapping[str, str]


def with_masters(model: nn.Module, held: Sequence[Held], world: World) -> list[Held]:
    """``held`` with this rank's share of the master, where ``model`` has one; collective.

    Raises ConfigError where an engine has masters and ``model`` is not the engine.
    """
    training = training_of(model, None, world)
    found = {kept.name: kept.shard for kept in masters_of(training.steps, training.places)}
    return replaced(held, Instead(found, training.places.ties), world)


def replaced(held: Sequence[Held], instead: Instead, world: World) -> list[Held]:
    """``held`` with this rank's share of what stands in the place of a tensor, where any rank has some.

    Collective.
    """
    firsts = [instead.ties.get(item.name, item.name) for item in held]
    # A rank may have no element of a master of which others have all.
    mine = torch.tensor([name in instead.shards for name in firsts], dtype=torch.int64, device="cpu")
    holders = world.all_reduce_sum(mine, "looking for what is saved instead").tolist()
    return [
        replace(item, shard=instead.shards.get(name, _nothing(item.shard))) if count else item
        for item, name, count in zip(held, firsts, holders, strict=True)
    ]


def _nothing(shard: Shard) -> Shard:
    layout = Layout(shard.layout.shape, 0, 0, ())
    return Shard(shard.name, layout, torch.empty(0, dtype=torch.float32, device="cpu"), lambda _: layout)
