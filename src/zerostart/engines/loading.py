"""What an engine does for a load: says who will hold what, and makes the empty shards."""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from zerostart.distributed.world import World, default_device
from zerostart.engines.base import EngineBase
from zerostart.engines.parallelism import resolve
from zerostart.engines.placements import PlacedShards, Placements
from zerostart.engines.residence import Residence
from zerostart.engines.shard import Shard
from zerostart.errors import ConfigError
from zerostart.geometry.layout import Parallelism
from zerostart.models import Alias


class MasterReader(Protocol):
    """Reads parameters once more, as the checkpoint stores them, into fp32 memory; collective."""

    def read(self, wanted: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Fill each 1-D tensor with this rank's share of the parameter of that name."""
        ...

    def read_runs(self, wanted: Sequence[tuple[str, int, torch.Tensor]]) -> None:
        """Fill each 1-D tensor with a run of this rank's local tensor, from the element given."""
        ...


class ShardMaker(Protocol):
    """Makes one rank's empty shards of a model, in the form that the engine trains.

    ``device`` is where the model's buffers go, and what is read arrives.
    """

    device: torch.device

    def agree_on_residence(self, model: nn.Module, names: Sequence[str]) -> Residence | None:
        """Agree with the other ranks where whole parameters will lie; collective, before any is allocated.

        None where the engine shards them. Raises InsufficientMemoryError on every rank.
        """
        ...

    def shard(self, model: nn.Module, names: Sequence[str]) -> list[Shard]:
        """Shard the meta parameters ``names`` (``named_parameters`` order, the same on all ranks)."""
        ...

    def finish(self, model: nn.Module) -> int:
        """Complete the load after all shards are filled; returns the bytes that other ranks sent."""
        ...


@dataclass(frozen=True)
class LoadingEngine(EngineBase):
    """The methods of an engine that a load calls, in this order: settings, meta model, ranks.

    Nothing here needs a process group, but ``shard_maker`` and what is asked of a live model.
    """

    # The settings, before anything is built.

    @property
    def common_config(self) -> Mapping[str, object]:
        """The part of the configuration that must be the same on every rank."""
        return dict(self.config or {})

    def check(self) -> None:  # nothing to refuse, unless an engine says so
        """Raise ConfigError or EngineError for settings that no load at this stage and mesh serves."""

    def require(self) -> None:
        """Import what the engine needs. Raises EngineError or UnsupportedVersionError where that fails."""

    @property
    def parameter_dtype(self) -> torch.dtype | None:
        """The dtype in which the configuration wants parameters held; None where it does not say."""
        return None

    @property
    def adopted_dtype(self) -> torch.dtype | None:
        """The dtype of parameters in a script that is set up for this engine; None: the one it asks for."""
        return self.parameter_dtype

    @property
    def building_dtype(self) -> torch.dtype | None:
        """The dtype in which such a script's models compute their buffers; None: the one it asks for."""
        return None

    @property
    def cast_dtype(self) -> torch.dtype | None:
        """The dtype to which the engine would cast every floating parameter; None where it casts none."""
        return None

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype to which parameters are cast when they are gathered, None where they are not.

        Such an engine has no masters of its own: the parameters that it is given are the masters.
        """
        return None

    @property
    def chunk_elements(self) -> int:
        """Elements of one read that the configuration asks for; 0 where it does not."""
        return 0

    # A model on the meta device.

    def parallel_plans(self) -> tuple[Mapping[str, str] | None, Mapping[str, str] | None]:
        """Return plans for experts and for tensors that come before the model's own."""
        return None, None

    def parallelism(self, model: nn.Module) -> Parallelism:
        """What the mesh does to the parameters of ``model``, with their true shapes; raises ConfigError."""
        if self.mesh.sequence_parallel > 1:
            self.check_sequence_parallel(model)
        return resolve(model, self.mesh, *self.parallel_plans())

    def check_sequence_parallel(self, model: nn.Module) -> None:
        """Raise ConfigError unless ranks can share the sequences of ``model``, as the mesh asks for."""
        size = self.mesh.sequence_parallel
        raise ConfigError(f"sequence_parallel={size} is not available on {self.title}; use 1")

    def allow_cast(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        """Note that ``parameter`` may be cast to ``dtype`` when it is gathered."""

    @abc.abstractmethod
    def placements(self, model: nn.Module, parallelism: Parallelism) -> Placements:
        """The shards that every rank will hold, and the memory in which it keeps them.

        Raises ConfigError or EngineError for what ``maker`` would refuse of the model.
        """

    # A rank, and the model that it has loaded.

    @abc.abstractmethod
    def shard_maker(
        self, world: World, dtype: torch.dtype | None, parallelism: Parallelism, placements: Placements
    ) -> ShardMaker:
        """Return the maker of this rank's shards of a model that is held in ``dtype``; collective."""

    def rehearsal_maker(self, world: World, parallelism: Parallelism, placements: Placements) -> ShardMaker:
        """What makes the shards of ``world.rank`` in a process that is alone, without the engine."""
        return PlacedShards(placements, world.rank, default_device())

    def follow_aliases(self, model: nn.Module, aliases: Sequence[Alias]) -> None:
        """Let places that hold parameters beside their modules follow what the engine puts into these."""

    def enable_sequence_parallel(self, model: nn.Module) -> None:
        """Prepare a loaded ``model`` for sequences that ranks share."""

    def preserve_calls(self, model: nn.Module, entries: Sequence[str]) -> None:
        """Have calls of the model's modules mean what its code says, whatever the engine's hooks do to them.

        ``entries`` are methods of the model beside its forward by which it is run.
        """

    def offer_masters(self, model: nn.Module, rounded: Collection[str], reader: MasterReader | None) -> None:
        """Let the engine read fp32 masters of the parameters ``rounded`` when it makes them."""

    def make_callable(self, model: nn.Module) -> None:
        """Let a loaded model that is not to be trained be called as it is; collective.

        Nothing is to be done where the shards gather themselves.
        """
