"""Engine protocol: how an engine shards, trains, keeps state and forecasts memory.

One engine is resolved for each job and handed on. An outsider's engine is a subclass of ``Engine``,
registered by name (``register_engine``, or the entry point group ``zerostart.engines``). It must pass
``zerostart.testing.EngineConformance``.
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
from zerostart.errors import ConfigError, EngineError
from zerostart.geometry.layout import Mesh, Parallelism, Ranges
from zerostart.models import Alias
from zerostart.upstream.accelerate.plugins import is_set


class MasterReader(Protocol):
    """Reads parameters once more, as the checkpoint stores them, into fp32 memory; collective."""

    def read(self, outputs: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Fill each 1-D tensor with this rank's share of the parameter of that name."""
        ...

    def read_runs(self, outputs: Sequence[tuple[str, int, torch.Tensor]]) -> None:
        """Fill each 1-D tensor with elements of this rank's local tensor.

        An output has the parameter's name and the index of the first element.
        """
        ...


class ShardMaker(Protocol):
    """Makes the empty shards of one rank, in the form that the engine trains.

    ``device`` holds the model's buffers and receives the bytes that are read.
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
        """Complete the load after all shards are filled; return the received bytes."""
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
    #: The package that the engine needs; most need only torch.
    library: ClassVar[str] = "torch"
    #: True if every rank holds all parameters, in flat buffers.
    replicates_parameters: ClassVar[bool] = False
    #: True if modules are units of ``fully_shard``, with DTensors as parameters.
    uses_fully_shard: ClassVar[bool] = False
    #: True if the engine makes masters and an optimizer, clips, steps, and writes consolidated weights.
    owns_optimizer: ClassVar[bool] = False
    #: True if an optimizer steps the parameters themselves, in their dtype, without other masters.
    steps_parameters: ClassVar[bool] = False
    #: Environment variable by which accelerate's launcher selects the engine, None without one.
    launcher_variable: ClassVar[str | None] = None

    zero_stage: int
    config: EngineConfig | None
    mesh: Mesh
    exchange: bool | None = None

    @classmethod
    def title_of(cls, zero_stage: int) -> str:
        """The engine at a stage, in words."""
        return f"{cls.name} ZeRO-{zero_stage}"

    @property
    def title(self) -> str:
        """This engine in words."""
        return self.title_of(self.zero_stage)

    @classmethod
    def is_sharded_at(cls, zero_stage: int) -> bool:
        """True if ranks share weights, gradients or optimizer states at a stage."""
        return zero_stage > 0

    @classmethod
    def is_launched(cls) -> bool:
        """True if accelerate's launcher has set up this engine.

        Raises ConfigError if it has set up another version of the engine.
        """
        return cls.launcher_variable is not None and is_set(cls.launcher_variable)

    @classmethod
    def configured_stage(cls, config: EngineConfig) -> int | None:
        """Return the ZeRO stage in a configuration, None without one."""
        return None

    @classmethod
    def configured_tensor_parallel(cls, config: EngineConfig) -> int:
        """Return the number of ranks that share tensors by a configuration, 1 without one."""
        return 1

    @classmethod
    def configured_expert_parallel(cls, config: EngineConfig) -> int:
        """Return the number of ranks that share experts by a configuration, 1 without one."""
        return 1

    @classmethod
    def for_stage(
        cls, zero_stage: int, config: EngineConfig | None, mesh: Mesh, exchange: bool | None
    ) -> Engine:
        """Make the engine of this family for a ZeRO stage.

        A subclass may choose a class by the stage.
        """
        return cls(zero_stage, config, mesh, exchange)

    # The settings, before anything is built.

    @property
    def common_config(self) -> Mapping[str, object]:
        """The part of the configuration that must be the same on every rank."""
        return dict(self.config or {})

    def check(self) -> None:  # nothing to refuse, unless an engine says so
        """Raise ConfigError or EngineError for settings that this stage and mesh cannot serve."""

    def import_library(self) -> None:
        """Import the engine's library. Raises EngineError or UnsupportedVersionError if that fails."""

    def compile_operations(self) -> None:
        """Compile and load the engine's own operators, before the first collective of its library."""

    @property
    def parameter_dtype(self) -> torch.dtype | None:
        """Dtype in which the configuration holds parameters, None without one."""
        return None

    @property
    def adopted_dtype(self) -> torch.dtype | None:
        """Dtype of parameters in a script set up for this engine, or None.

        With None the script's dtype is used.
        """
        return self.parameter_dtype

    @property
    def building_dtype(self) -> torch.dtype | None:
        """Dtype of the buffers that such a script's models compute; None: as it asks."""
        return None

    @property
    def cast_dtype(self) -> torch.dtype | None:
        """Dtype to which the engine casts every floating parameter, None without a cast."""
        return None

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Dtype of gathered parameters; None if the gather casts nothing.

        An engine with such a dtype has no other masters: the parameters that it receives are the masters.
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
        """Return the cuts that the mesh makes in the unsharded parameters of ``model``.

        Raises ConfigError.
        """
        if self.mesh.sequence_parallel > 1:
            self.check_sequence_parallel(model)
        return resolve(model, self.mesh, *self.parallel_plans())

    def check_sequence_parallel(self, model: nn.Module) -> None:
        """Raise ConfigError unless the mesh's ranks can share the sequences of ``model``."""
        size = self.mesh.sequence_parallel
        raise ConfigError(f"sequence_parallel={size} is not available on {self.title}; use 1")

    def allow_cast(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        """Note that ``parameter`` may be cast to ``dtype`` when it is gathered."""

    @abc.abstractmethod
    def placements(self, model: nn.Module, parallelism: Parallelism) -> Placements:
        """Return the shards and memory of every rank.

        Raises ConfigError or EngineError for a model that ``shard_maker`` would refuse.
        """

    # A rank, and the model that it has loaded.

    @abc.abstractmethod
    def shard_maker(
        self, world: World, dtype: torch.dtype | None, parallelism: Parallelism, placements: Placements
    ) -> ShardMaker:
        """Return the maker of this rank's shards of a model in ``dtype``; collective."""

    def follow_aliases(self, model: nn.Module, aliases: Sequence[Alias]) -> None:
        """Keep other places that hold a module's parameters in step with the module."""

    def enable_sequence_parallel(self, model: nn.Module) -> None:
        """Prepare a loaded ``model`` for sequences that ranks share."""

    def preserve_calls(self, model: nn.Module, entries: Sequence[str]) -> None:
        """Protect the calls of the model's modules from side effects of the engine's hooks.

        ``entries`` are methods next to ``forward`` that run the model.
        """

    def offer_masters(self, model: nn.Module, rounded: Collection[str], reader: MasterReader | None) -> None:
        """Let the engine read fp32 masters of the parameters ``rounded`` when it makes them."""

    def make_callable(self, model: nn.Module) -> None:
        """Let a loaded model be called without training it; collective.

        Engines whose shards gather themselves need nothing.
        """

    # Shards and training state of a loaded model. Class methods are called on every engine for any model; the
    # defaults answer for models of other engines.

    @abc.abstractmethod
    def shards_of(self, model: nn.Module, parallelism: Parallelism, rank: int) -> dict[str, Shard]:
        """Return the current shards of a live model by parameter name, aliases included.

        Other parameters are whole on every rank. ``Shard.replica`` is this rank's place among replicas.
        """

    @classmethod
    def find_shards(cls, model: nn.Module, world: World) -> dict[str, Shard]:
        """Find the shards of this kind of engine in any live model.

        The keys are parameter names, aliases included; other parameters are not sharded by it.
        """
        return {}

    @classmethod
    def reshard_units(cls, model: nn.Module) -> None:
        """Replace gathered parameters of ``model`` by its shards.

        Not collective. Engines whose parameters remain the same objects need nothing.
        """

    @classmethod
    def has_own_values(cls, parameter: torch.Tensor) -> bool:
        """True if other ranks have other values of ``parameter`` and no shard of it."""
        return False

    # Training state.

    @classmethod
    def training_state(cls, model: nn.Module, optimizer: object) -> TrainingState | None:
        """Return the training state of ``model``, None if this kind of engine has none.

        Raises ConfigError if another engine trains the model, and ConfigError or EngineError for a state that
        cannot be read.
        """
        return None

    # Changed and replaced parameters.

    @classmethod
    def drop_gathered(cls, parameters: Iterable[torch.Tensor]) -> None:
        """Drop gathered copies of those ``parameters`` whose shards have been written to."""

    @classmethod
    def is_gathered(cls, parameter: torch.Tensor) -> bool:
        """True if a script has gathered ``parameter`` and the engine takes its values afterwards."""
        return False

    @classmethod
    def check_editable(cls, parameter: torch.Tensor, name: str) -> None:
        """Raise ConfigError if the trained values of a parameter are elsewhere."""

    @classmethod
    def master_of(cls, parameter: torch.Tensor) -> AbstractContextManager[Master | None]:
        """Give the fp32 master of this rank's share of ``parameter``, to change in place.

        None without a master. Not collective, but every rank with a share must enter it.
        """
        return contextlib.nullcontext()

    @classmethod
    def check_replaceable(cls, model: nn.Module, parameter: torch.Tensor, action: str) -> None:
        """Raise EngineError, which begins with ``action``, once ``parameter`` cannot be replaced any more."""

    @classmethod
    def unshard_modules(cls, model: nn.Module, modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Context in which the parameters of ``modules`` are whole and replaceable; collective.

        Afterwards the modules' parameters are sharded again, with the values of rank 0.
        """
        return contextlib.nullcontext()

    # A training run.

    #: The mixed precisions that it trains in, by accelerate's names.
    precisions: ClassVar[tuple[str, ...]] = ("no", "bf16")
    #: Backend for accelerate on hosts without an accelerator; None: ``cpu=True`` is enough.
    host_backend: ClassVar[str | None] = None

    def training_dtype(self, mixed_precision: str) -> torch.dtype | None:
        """Dtype of the model under a mixed precision; None: any, float32 preferred."""
        return None

    def training_config(self, job: TrainingJob, user_config: EngineConfig) -> dict[str, object]:
        """Complete ``user_config``, the ``engine.config`` of a run's YAML file.

        Raises ConfigError for keys that contradict the job.
        """
        return dict(user_config)

    def accelerate_setup(self, mixed_precision: str) -> AccelerateSetup:
        """Return accelerate's settings for a model that this engine has sharded."""
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
        """Shard parameters added to a loaded model, such as adapters, before training.

        All ranks call it. Engines that accept new parameters before training need nothing.
        """

    def synchronize_added(self, model: nn.Module, added: Sequence[nn.Parameter]) -> None:
        """Give ``added`` parameters the same values and gradients on every rank; collective.

        Engines that accept parameters before training need nothing.
        """

    def adopt_expert(
        self, parameter: nn.Parameter, like: nn.Parameter, ranges: Ranges, shape: tuple[int, ...]
    ) -> nn.Parameter:
        """Return the added ``parameter`` of this rank's experts, trained like their weight ``like``.

        ``ranges`` are the parts of each rank in the parameter of all experts, of ``shape``. Collective.
        """
        raise EngineError(f"{self.title} cannot train adapters of experts that ranks share")

    # The model as it is called, before training and around each batch.

    def exempt_unreached(self, model: nn.Module) -> None:
        """Exempt parameters without a gradient from weight decay; called before training.

        ``model`` is the object that is called. Nothing is needed if such parameters have no gradient at all,
        since torch's optimizers skip them.
        """

    def begin_batch(self, model: nn.Module, last: bool) -> None:
        """Called before the forward of each batch whose gradients are accumulated for one step.

        ``last`` is true for the one before the optimizer's step: for each, where nothing is accumulated.
        """

    # A forecast of memory.

    @property
    def configured_optimizer(self) -> str | None:
        """Name of the optimizer that the engine makes itself, as ``zerostart.plan`` takes it."""
        return None

    def memory_peaks(self, model: nn.Module, inputs: MemoryInputs) -> list[MemoryPeak]:
        """Return the possible peaks of memory after the load, through the first step."""
        gradients = inputs.shares.trained * inputs.shares.dtype.itemsize
        states = {"gradients": gradients, "optimizer state": inputs.optimizer.states * gradients}
        return [inputs.peak(False, "initialize", {}), inputs.peak(False, "step", states)]
