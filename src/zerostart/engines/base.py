"""What an engine is to the rest of the house: one object for each job, resolved once and handed on.

An outsider's engine is a subclass of ``Engine``, registered by name (``register_engine``, or the entry point
group ``zerostart.engines``); ``zerostart.testing.EngineConformance`` is what it has to pass.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from zerostart.distributed.world import World, default_device
from zerostart.engines.memory import Array, Held, Moment, Optimizer, Target
from zerostart.engines.parallelism import resolve
from zerostart.engines.placed import PlacedShards
from zerostart.engines.placements import Placements
from zerostart.engines.residence import Residence
from zerostart.engines.shard import Shard
from zerostart.engines.training import AccelerateSetup, Launched, TrainingJob
from zerostart.errors import ConfigError
from zerostart.geometry.layout import Mesh, Parallelism
from zerostart.models import Alias
from zerostart.upstream.accelerate.plugins import is_set


class MasterReader(Protocol):
    """Reads parameters once more, as the checkpoint stores them, into fp32 memory; collective."""

    def read(self, wanted: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Fill each 1-D tensor with this rank's share of the parameter of that name."""
        ...

    def read_runs(self, wanted: Sequence[tuple[str, int, torch.Tensor]]) -> None:
        """Fill each 1-D tensor with a run of this rank's local tensor, from the element given."""
        ...


class ShardMaker(Protocol):
    """Makes the empty shards of one model on one rank, which the engine will accept as its own.

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
        """Hand over after all storages are filled; returns the bytes that this rank got from others."""
        ...


@dataclass(frozen=True)
class Engine(abc.ABC):
    """One engine at one ZeRO stage, with its configuration, over one mesh of ranks.

    ``config`` is the ``engine_config`` of a load; ``exchange`` its argument of that name. Nothing here needs
    a process group, but ``maker`` and what is asked of a live model.
    """

    #: The name in ``engine=``, and the ZeRO stages that it can be asked for.
    name: ClassVar[str]
    stages: ClassVar[tuple[int, ...]] = (3,)
    #: Whether parameters lie whole on every rank, in flat buffers.
    whole: ClassVar[bool] = False
    #: Whether modules are units of ``fully_shard``, with DTensors as parameters.
    units: ClassVar[bool] = False
    #: Whether the engine makes masters and an optimizer of its own, clips and steps itself, and writes
    #: consolidated weights itself.
    wraps: ClassVar[bool] = False
    #: The mixed precisions, as accelerate names them, in which it trains.
    precisions: ClassVar[tuple[str, ...]] = ("no", "bf16")
    #: Whether an optimizer steps the parameters themselves, in their own dtype: there are no other masters.
    steps_parameters: ClassVar[bool] = False
    #: The package that the engine needs; torch alone for most.
    library: ClassVar[str] = "torch"
    #: The environment variable with which accelerate's launcher sets up this very engine, None for none.
    launched_by: ClassVar[str | None] = None
    #: The backend that accelerate must be told on hosts without an accelerator; None: ``cpu=True`` will do.
    host_backend: ClassVar[str | None] = None

    zero_stage: int
    config: Mapping[str, Any] | None
    mesh: Mesh
    exchange: bool | None = None

    @classmethod
    def of(
        cls, zero_stage: int, config: Mapping[str, Any] | None, mesh: Mesh, exchange: bool | None
    ) -> Engine:
        """The engine of this family for a stage; one class may serve several names' stages differently."""
        return cls(zero_stage, config, mesh, exchange)

    @classmethod
    def is_launched(cls) -> bool:
        """Whether accelerate's launcher has set up this engine.

        Raises ConfigError where it has set up a version of it that is not this one.
        """
        return cls.launched_by is not None and is_set(cls.launched_by)

    @classmethod
    def titled(cls, zero_stage: int) -> str:
        """The engine at a stage, in words."""
        return f"{cls.name} ZeRO-{zero_stage}"

    @classmethod
    def shares_at(cls, zero_stage: int) -> bool:
        """Whether ranks share anything of a model at a stage: its weights, gradients or optimizer states."""
        return zero_stage > 0

    @classmethod
    def configured_stage(cls, config: Mapping[str, Any]) -> int | None:
        """The ZeRO stage that a configuration itself asks for, None where it says nothing of it."""
        return None

    @classmethod
    def configured_tensors(cls, config: Mapping[str, Any]) -> int:
        """How many ranks a configuration itself has share tensors; 1 where it says nothing of it."""
        return 1

    @classmethod
    def configured_experts(cls, config: Mapping[str, Any]) -> int:
        """How many ranks a configuration itself has share experts; 1 where it says nothing of it."""
        return 1

    @property
    def title(self) -> str:
        """This engine in words."""
        return self.titled(self.zero_stage)

    # --- What is asked before anything is built.

    @property
    def common_config(self) -> Mapping[str, Any]:
        """What of the configuration must be the same on every rank."""
        return dict(self.config or {})

    def check(self) -> None:  # noqa: B027  # nothing to refuse, unless an engine says so
        """Raise ConfigError or EngineError for settings that no load can serve, or not at this stage."""

    def check_mesh(self) -> None:  # noqa: B027
        """Raise ConfigError for a mesh that cannot be trained, or not with these settings."""

    def require(self) -> None:  # noqa: B027
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
    def computing_dtype(self) -> torch.dtype | None:
        """The dtype to which parameters are cast when they are gathered, None where they are not.

        Such an engine has no masters of its own: the parameters that it is given are the masters.
        """
        return None

    @property
    def chunk_elements(self) -> int:
        """Elements of one read that the configuration asks for; 0 where it does not."""
        return 0

    @property
    def configured_optimizer(self) -> str | None:
        """The name, as ``zerostart.plan`` takes it, of the optimizer that the engine is to make itself."""
        return None

    # --- What is asked of a model on meta.

    def given_plans(self) -> tuple[Mapping[str, str] | None, Mapping[str, str] | None, Any]:
        """Plans for experts and for tensors that come before the model's own, and DeepSpeed's section."""
        return None, None, None

    def parallelism(self, model: nn.Module) -> Parallelism:
        """What the mesh does to the parameters of ``model``, with their true shapes; raises ConfigError."""
        if self.mesh.sequence_parallel > 1:
            self.check_sequences(model)
        return resolve(model, self.mesh, *self.given_plans())

    def check_sequences(self, model: nn.Module) -> None:
        """Raise ConfigError unless ranks can share the sequences of ``model``, as the mesh asks for."""
        size = self.mesh.sequence_parallel
        raise ConfigError(f"sequence_parallel={size} is not available on {self.title}; use 1")

    def let_cast(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:  # noqa: B027
        """Note that ``parameter`` may be cast to ``dtype`` when it is gathered."""

    @abc.abstractmethod
    def placements(self, model: nn.Module, parallelism: Parallelism) -> Placements:
        """What every rank will hold of the parameters, and where it keeps it.

        Raises ConfigError or EngineError for what ``maker`` would refuse of the model.
        """

    # --- What happens on a rank.

    @abc.abstractmethod
    def maker(
        self, world: World, dtype: torch.dtype | None, parallelism: Parallelism, placements: Placements
    ) -> ShardMaker:
        """What makes this rank's shards of a model that is held in ``dtype``; collective."""

    def playing(self, world: World, parallelism: Parallelism, placements: Placements) -> ShardMaker:
        """What makes the shards of ``world.rank`` in a process that is alone, without the engine."""
        return PlacedShards(placements, world.rank, default_device())

    def keep_aliases(self, model: nn.Module, aliases: Sequence[Alias]) -> None:  # noqa: B027
        """Let places that hold parameters beside their modules follow what the engine puts into these."""

    def share_sequences(self, model: nn.Module) -> None:  # noqa: B027
        """Prepare a loaded ``model`` for sequences that ranks share."""

    def keep_calls(self, model: nn.Module, entries: Sequence[str]) -> None:  # noqa: B027
        """Have calls of the model's modules mean what its code says, whatever the engine's hooks do to them.

        ``entries`` are methods of the model beside its forward by which it is run.
        """

    def offer_masters(  # noqa: B027
        self, model: nn.Module, rounded: Collection[str], reader: MasterReader | None
    ) -> None:
        """Let the engine read fp32 masters of the parameters ``rounded`` when it makes them."""

    @abc.abstractmethod
    def shards_of(self, model: nn.Module, parallelism: Parallelism, rank: int) -> dict[str, Shard]:
        """The shards of a live model as they are now, by parameter name, aliases included.

        What is not there is whole on every rank. Of replicas ``Shard.held`` tells which one this rank has.
        """

    def make_callable(self, model: nn.Module) -> None:  # noqa: B027
        """Let a loaded model that is not to be trained be called as it is; collective.

        Nothing is to be done where the shards gather themselves.
        """

    @classmethod  # noqa: B027
    def put_to_rest(cls, model: nn.Module) -> None:
        """Have ``model`` hold its shards as its parameters again, where a forward has left copies gathered.

        Every rank by itself. Nothing is to be done where the parameters stay the same objects.
        """

    @classmethod
    def found(cls, model: nn.Module, world: World) -> dict[str, Shard]:
        """The shards in which this kind of engine holds a live model, whoever loaded it.

        By parameter name, aliases included; what is not there is not sharded by it.
        """
        return {}

    # --- What a training run asks.

    def kept_dtype(self, mixed_precision: str) -> torch.dtype | None:
        """The one dtype in which the model is held under a mixed precision; None: any, float32 at best."""
        return None

    def training_config(self, job: TrainingJob, given: Mapping[str, Any]) -> dict[str, Any]:
        """The complete ``engine_config`` of a training run; ``given`` is ``engine.config`` of its YAML file.

        Raises ConfigError for what contradicts the job.
        """
        return dict(given)

    def launched(self) -> Launched:
        """What accelerate's launcher has set up for this engine, where ``launched_by`` is in the environment.

        Raises ConfigError, by the launcher's own word, for what a training run cannot do so.
        """
        return Launched()

    def launcher_file(self, mixed_precision: str, own_file: str | None) -> dict[str, Any]:
        """accelerate's configuration file for a run on this engine, but for the number of ranks.

        ``own_file`` is the path of the engine's own, if it is to have one.
        """
        return {"distributed_type": "MULTI_GPU", "mixed_precision": mixed_precision}

    def own_file(self) -> dict[str, Any] | None:
        """A configuration file of the engine's own, as JSON, to begin with; None where it knows none."""
        return None

    def accelerate(self, mixed_precision: str) -> AccelerateSetup:
        """How accelerate is set up for a model that this engine, with its configuration, has sharded."""
        return AccelerateSetup(
            {"mixed_precision": mixed_precision, "cpu": not torch.accelerator.is_available()}
        )

    @property
    def averaging(self) -> int:
        """The number by which the engine divides the sum of the ranks' gradients.

        So a rank's gradient counts as one ``averaging``-th.
        """
        return self.mesh.world_size

    def shard_added(self, model: nn.Module, mixed_precision: str) -> None:  # noqa: B027
        """Shard what was added to a loaded model since (adapters), on all ranks alike, before it is trained.

        Nothing is to be done where the engine takes up parameters as they are then.
        """

    def share_added(self, model: nn.Module, added: Sequence[nn.Parameter]) -> None:  # noqa: B027
        """Have ``added`` parameters of a loaded model the same on every rank, and trained alike; collective.

        Nothing is to be done where the engine takes up parameters before they are trained.
        """

    def begin_batch(self, model: nn.Module, last: bool) -> None:  # noqa: B027
        """Called before the forward of each batch whose gradients are accumulated for one step.

        ``last`` is true for the one before the optimizer's step: for each, where nothing is accumulated.
        """

    def spare_unreached(self, model: nn.Module) -> None:  # noqa: B027
        """Called before training: let what no backward reaches not decay; ``model`` is as it is called.

        Nothing is to be done where it has no gradient, and torch's optimizers pass over it.
        """

    def begin_sharing(self, model: nn.Module) -> None:  # noqa: B027
        """Called before training, for sequences that ranks share; ``model`` is as it is called."""

    def sequence_chunks(self, rank: int) -> tuple[tuple[int, ...], int]:
        """Which chunks of a sequence a rank has, and how many there are of it, of equal length."""
        place, size = self.mesh.sequence(rank)
        return (place,), size

    def attending(self) -> AbstractContextManager[None]:
        """Around a forward, and around its backward, of a model whose sequences ranks share."""
        return contextlib.nullcontext()

    # --- What a forecast asks.

    def moments(
        self, model: nn.Module, placements: Placements, held: Held, optimizer: Optimizer, target: Target
    ) -> list[Moment]:
        """The moments after the load, through the first step, at which memory may be at its highest."""
        shards: dict[str, Array | int] = {"parameters": held.device, "buffers": held.buffers}
        gradients = held.trained * held.dtype.itemsize
        full = {**shards, "gradients": gradients, "optimizer state": optimizer.states * gradients}
        return [Moment("initialize", {}, shards), Moment("step", {"parameters": held.host}, full)]

    def relaxations(self, accelerator: bool) -> Iterator[tuple[list[str], Engine]]:
        """Other settings for as many ranks, each on top of those before: what differs, and the engine."""
        return iter(())
