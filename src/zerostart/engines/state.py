"""What an engine tells of a live model: the shards in which it holds the parameters."""

from __future__ import annotations

import abc
from dataclasses import dataclass

from torch import nn

from zerostart.distributed.world import World
from zerostart.engines.base import EngineBase
from zerostart.engines.shard import Shard
from zerostart.geometry.layout import Parallelism


@dataclass(frozen=True)
class StateEngine(EngineBase):
    """The part of an engine that saving, resuming and comparing ask of a live model."""

    @abc.abstractmethod
    def shards_of(self, model: nn.Module, parallelism: Parallelism, rank: int) -> dict[str, Shard]:
        """The shards of a live model as they are now, by parameter name, aliases included.

        What is not there is whole on every rank. Of replicas ``Shard.held`` tells which one this rank has.
        """

    @classmethod
    def find_shards(cls, model: nn.Module, world: World) -> dict[str, Shard]:
        """The shards in which this kind of engine holds a live model, whoever loaded it.

        By parameter name, aliases included; what is not there is not sharded by it.
        """
        return {}

    @classmethod
    def put_to_rest(cls, model: nn.Module) -> None:
        """Have ``model`` hold its shards as its parameters again, where a forward has left copies gathered.

        Every rank by itself. Nothing is to be done where the parameters stay the same objects.
        """
