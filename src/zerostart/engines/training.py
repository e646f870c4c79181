"""What a training run tells its engine, and what the engine answers: its configuration, and accelerate's.

A runner asks an ``Engine`` and compares no names, so that it serves an engine of somebody else's too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn

from zerostart.distributed.world import current_world
from zerostart.engines.base import EngineBase, EngineConfig


@dataclass(frozen=True)
class TrainingJob:
    """What an engine's configuration has to agree with."""

    #: accelerate's: ``"no"``, ``"bf16"`` or ``"fp16"``.
    mixed_precision: str
    #: Sequences that each rank sees at a time.
    batch_size: int
    #: How many times over, for one step.
    accumulation: int
    #: 0 turns clipping off.
    max_grad_norm: float
    world_size: int
    #: The model's; None where it has none.
    hidden_size: int | None = None
    #: Ranks that see one batch.
    sequence_parallel: int = 1

    @property
    def train_batch_size(self) -> int:
        """Sequences in a step."""
        return self.batch_size * self.accumulation * (self.world_size // self.sequence_parallel)


@dataclass(frozen=True)
class AccelerateSetup:
    """How an ``Accelerator`` is made around a model that is sharded already."""

    #: Its keyword arguments.
    options: EngineConfig
    #: Variables that are set while it is made.
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Warnings, by pattern and category, of which nobody can change the cause.
    ignored: tuple[tuple[str, type[Warning]], ...] = ()


@dataclass(frozen=True)
class TrainingEngine(EngineBase):
    """The part of an engine that a training run asks: its configuration, then each step."""

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

        So a rank's gradient counts as one ``averaging``-th.
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

    def begin_sequence_parallel(self, model: nn.Module) -> None:
        """Called before training, for sequences that ranks share; ``model`` is as it is called."""

    def begin_batch(self, model: nn.Module, last: bool) -> None:
        """Called before the forward of each batch whose gradients are accumulated for one step.

        ``last`` is true for the one before the optimizer's step: for each, where nothing is accumulated.
        """

    def sequence_chunks(self, rank: int) -> tuple[tuple[int, ...], int]:
        """Which chunks of a sequence a rank has, and how many there are of it, of equal length."""
        place, size = self.mesh.sequence(rank)
        return (place,), size

    def attention_context(self) -> AbstractContextManager[None]:
        """Around a forward, and around its backward, of a model whose sequences ranks share."""
        return contextlib.nullcontext()


# Parameters that are added to a loaded model, such as adapters: the same on every rank.


def with_first_values(make: Callable[[], Sequence[nn.Parameter]]) -> Sequence[nn.Parameter]:
    """What ``make`` gives, which may be collective, with the values that it has on rank 0; collective."""
    world = current_world()
    with world.collectives("sharing what was added"):
        made = make()
        for parameter in made if dist.is_initialized() else ():
            if not parameter.is_meta:
                # The group of the ranks' messages carries what lies on the host, whatever theirs is for.
                group = world.group if parameter.device.type == "cpu" else None
                dist.broadcast(parameter.detach(), src=0, group=group)
    return made
