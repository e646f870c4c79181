"""What a training run tells its engine, and what the engine answers: its configuration, and accelerate's.

A runner asks an ``Engine`` and compares no names, so that it serves an engine of somebody else's too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TrainingJob:
    """What an engine's configuration has to agree with.

    ``mixed_precision`` is accelerate's: ``"no"``, ``"bf16"`` or ``"fp16"``. A step sees ``batch_size``
    sequences on each of ``world_size`` ranks, ``accumulation`` times over; ``max_grad_norm`` 0 turns clipping
    off. ``hidden_size`` is the model's, None where it has none. ``sequence_parallel`` ranks see one batch.
    """

    mixed_precision: str
    batch_size: int
    accumulation: int
    max_grad_norm: float
    world_size: int
    hidden_size: int | None = None
    sequence_parallel: int = 1

    @property
    def train_batch_size(self) -> int:
        """Sequences in a step."""
        return self.batch_size * self.accumulation * (self.world_size // self.sequence_parallel)


@dataclass(frozen=True)
class AccelerateSetup:
    """How an ``Accelerator`` is made around a model that is sharded already.

    ``options`` are keyword arguments of it, ``environment`` variables that are set while it is made.
    ``ignored`` has warnings, by pattern and category, of which nobody can change the cause.
    """

    options: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[tuple[str, type[Warning]], ...] = ()


@dataclass(frozen=True)
class Launched:
    """What accelerate's launcher has set up for an engine, in the words of a training configuration.

    ``config`` is what ``engine.config`` would say of it. ``agreed`` has the values of other keys, by their
    dotted names, each with what the launcher's own file calls it; they must be what the configuration says.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    agreed: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
