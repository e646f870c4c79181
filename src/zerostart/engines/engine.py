"""An engine: how it loads, trains, keeps state and forecasts, resolved once for each job and handed on.

An outsider's engine is a subclass of ``Engine``, registered by name (``register_engine``, or the entry point
group ``zerostart.engines``); ``zerostart.testing.EngineConformance`` is what it has to pass.
"""

# ruff: noqa: B027  # a method that an engine may leave out does nothing

from __future__ import annotations

import abc
import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import nn

from zerostart.distributed.world import World
from zerostart.engines.forecast import MemoryInputs, MemoryPeak
from zerostart.engines.parallelism import resolve
from zerostart.engines.placements import Placements
from zerostart.engines.residence import Residence
from zerostart.engines.shard import Shard
from zerostart.engines.state import Master, TrainingState
from zerostart.engines.training import AccelerateSetup, EngineConfig, TrainingJob
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
    """Makes one rank's empty shards of a model, in the form that the engine trains.

    ``device`` is where the model's buffers go, and what is read arrives.
    """

    device: torch.device

    def agree_on_residence(self, model: nn.Module, names: Sequence[str]) -> Residence | None:
        """Agree with the other ranks where whole parameters go; collective, before any is allocated.

        None if the engine shards them. Raises InsufficientMemoryError on every rank.
        """
        return None

    def shard(self, model: nn.Module, names: Sequence[str]) -> list[Shard]:
        """Shard the meta parameters ``names`` (``named_parameters`` order, the same on all ranks)."""
        ...

    def finish(self, model: nn.Module) -> int:
        """Complete the load after all shards are filled; return the bytes that other ranks sent."""
        return 0


@dataclass(frozen=True)
class Engine(abc.ABC):
    """One engine at one ZeRO stage, with its configuration, over one mesh of ranks.

    To be written for an engine of one's own: ``name``, ``placements``, ``shard_maker`` and ``shards_of``; the
    rest has defaults. ``config`` is the ``engine_config`` of a load; ``exchange`` its argument of that name.
    """

    #: The name in ``engine=``, and the ZeRO stages that it can be asked for.
    name: ClassVar[str]
    stages: ClassVar[tuple[int, ...]] = (3,)
    #: The package that the engine needs; torch alone for most.
    library: ClassVar[str] = "torch"
    #: Whether parameters lie whole on every rank, in flat buffers.
    replicates_parameters: ClassVar[bool] = False
    #: Whether modules are units of ``fully_shard``, with DTensors as parameters.
    uses_fully_shard: ClassVar[bool] = False
    #: Whether the engine makes masters and an optimizer of its own, clips and steps itself, and writes
    #: consolidated weights itself.
    owns_optimizer: ClassVar[bool] = False
    #: Whether an optimizer steps the parameters themselves, in their own dtype: there are no other masters.
    steps_parameters: ClassVar[bool] = False
    #: The environment variable with which accelerate's launcher sets up this very engine, None for none.
    launcher_variable: ClassVar[str | None] = None

    zero_stage: int
    config: EngineConfig | None
    mesh: Mesh
    exchange: bool | None = None

    @classmethod
    def titled(cls, zero_stage: int) -> str:
        """The engine at a stage, in words."""
        return f"{cls.name} ZeRO-{zero_stage}"

    @property
    def title(self) -> str:
        """This engine in words."""
        return self.titled(self.zero_stage)

    @classmethod
    def is_sharded_at(cls, zero_stage: int) -> bool:
        """Whether ranks share anything of a model at a stage: its weights, gradients or optimizer states."""
        return zero_stage > 0

    @classmethod
    def is_launched(cls) -> bool:
        """Whether accelerate's launcher has set up this engine.

        Raises ConfigError where it has set up a version of it that is not this one.
        """
        return cls.launcher_variable is not None and is_set(cls.launcher_variable)

    @classmethod
    def configured_stage(cls, config: EngineConfig) -> int | None:
        """The ZeRO stage that a configuration itself asks for, None where it says nothing of it."""
        return None

    @classmethod
    def configured_tensor_parallel(cls, config: EngineConfig) -> int:
        """How many ranks a configuration itself has share tensors; 1 where it says nothing of it."""
        return 1

    @classmethod
    def configured_expert_parallel(cls, config: EngineConfig) -> int:
        """How many ranks a configuration itself has share experts; 1 where it says nothing of it."""
        return 1

    @classmethod
    def for_stage(
        cls, zero_stage: int, config: EngineConfig | None, mesh: Mesh, exchange: bool | None
    ) -> Engine:
        """Make the engine of this family for a ZeRO stage; a subclass may choose a class by the stage."""
        return cls(zero_stage, config, mesh, exchange)

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

    # A loaded model: its shards, and what is kept for them. Class methods are asked of every engine, of any
    # model: what is not this kind of engine's is answered by the defaults.

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

    @classmethod
    def has_own_values(cls, parameter: torch.Tensor) -> bool:
        """Whether other ranks have other values under the name of ``parameter``, and no shard of it."""
        return False

    # What is kept for them.

    @classmethod
    def training_state(cls, model: nn.Module, optimizer: object) -> TrainingState | None:
        """What is kept for ``model`` in training; None where this kind of engine does not keep it.

        Raises ConfigError where an engine trains the model and is not what is given, and ConfigError or
        EngineError for a state that cannot be read where it is.
        """
        return None

    # What follows when parameters are changed or replaced.

    @classmethod
    def drop_gathered(cls, parameters: Iterable[torch.Tensor]) -> None:
        """Drop gathered copies of those ``parameters`` whose shards have been written to."""

    @classmethod
    def is_gathered(cls, parameter: torch.Tensor) -> bool:
        """Whether a script has gathered ``parameter`` itself, and the engine takes its values afterwards."""
        return False

    @classmethod
    def check_editable(cls, parameter: torch.Tensor, name: str) -> None:
        """Raise ConfigError where the trained values of a parameter are not where they would be changed."""

    @classmethod
    def master_of(cls, parameter: torch.Tensor) -> AbstractContextManager[Master | None]:
        """The fp32 master of this rank's share of ``parameter``, to be changed in place; None without one.

        Not collective, but every rank that has a share must come through it.
        """
        return contextlib.nullcontext()

    @classmethod
    def check_replaceable(cls, model: nn.Module, parameter: torch.Tensor, action: str) -> None:
        """Raise EngineError, which begins with ``action``, once ``parameter`` cannot be replaced any more."""

    @classmethod
    def whole_for_a_while(
        cls, model: nn.Module, modules: Sequence[nn.Module]
    ) -> AbstractContextManager[None]:
        """Inside, the parameters of ``modules`` are whole on every rank and may be replaced; collective.

        Afterwards what the modules then have is sharded again, with the values of rank 0.
        """
        return contextlib.nullcontext()

    # A training run.

    #: The mixed precisions, as accelerate names them, in which it trains.
    precisions: ClassVar[tuple[str, ...]] = ("no", "bf16")
    #: The backend that accelerate must be told on hosts without an accelerator; None: ``cpu=True`` will do.
    host_backend: ClassVar[str | None] = None

    def training_dtype(self, mixed_precision: str) -> torch.dtype | None:
        """The one dtype in which the model is held under a mixed precision; None: any, float32 at best."""
        return None

    def training_config(self, job: TrainingJob, given: EngineConfig) -> dict[str, object]:
        """The complete ``engine_config`` of a training run; ``given`` is ``engine.config`` of its YAML file.

        Raises ConfigError for what contradicts the job.
        """
        return dict(given)

    def accelerate_setup(self, mixed_precision: str) -> AccelerateSetup:
        """How accelerate is set up for a model that this engine, with its configuration, has sharded."""
        return AccelerateSetup(
            {"mixed_precision": mixed_precision, "cpu": not torch.accelerator.is_available()}
        )

    @property
    def gradient_divisor(self) -> int:
        """The number by which the engine divides the sum of the ranks' gradients.

        A rank's gradient therefore counts as one ``gradient_divisor``-th.
        """
        return self.mesh.world_size

    # Parameters that were added to a loaded model, such as adapters.

    def shard_added(self, model: nn.Module, mixed_precision: str) -> None:
        """Shard what was added to a loaded model since (adapters), on all ranks alike, before it is trained.

        Nothing is to be done where the engine takes up parameters as they are then.
        """

    def synchronize_added(self, model: nn.Module, added: Sequence[nn.Parameter]) -> None:
        """Have ``added`` parameters of a loaded model the same on every rank, and trained alike; collective.

        Nothing is to be done where the engine takes up parameters before they are trained.
        """

    # The model as it is called, before training and around each batch.

    def spare_unreached(self, model: nn.Module) -> None:
        """Called before training: let what no backward reaches not decay; ``model`` is as it is called.

        Nothing is to be done where it has no gradient, and torch's optimizers pass over it.
        """

    def begin_batch(self, model: nn.Module, last: bool) -> None:
        """Called before the forward of each batch whose gradients are accumulated for one step.

        ``last`` is true for the one before the optimizer's step: for each, where nothing is accumulated.
        """

    # A forecast of memory.

    @property
    def configured_optimizer(self) -> str | None:
        """The name, as ``zerostart.plan`` takes it, of the optimizer that the engine is to make itself."""
        return None

    def memory_peaks(self, model: nn.Module, inputs: MemoryInputs) -> list[MemoryPeak]:
        """Return the possible peaks of memory after the load, through the first step."""
        gradients = inputs.shares.trained * inputs.shares.dtype.itemsize
        states = {"gradients": gradients, "optimizer state": inputs.optimizer.states * gradients}
        return [inputs.peak(False, "initialize", {}), inputs.peak(False, "step", states)]
