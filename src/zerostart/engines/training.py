"""Settings between a training run and its engine.

A runner asks an ``Engine`` and compares no names, so that it also serves engines of outsiders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import nn

from zerostart.distributed.world import current_world

#: An engine's configuration, or a section of it: JSON values by name, and for FSDP2 also objects.
EngineConfig: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class TrainingJob:
    """The settings of a run that an engine's configuration must agree with."""

    #: accelerate's: ``"no"``, ``"bf16"`` or ``"fp16"``.
    mixed_precision: str
    #: Sequences in a batch of each rank.
    batch_size: int
    #: Batches of each rank in one step.
    accumulation: int
    #: 0 turns clipping off.
    max_grad_norm: float
    world_size: int
    #: Hidden size of the model; None without one.
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

    #: Keyword arguments of ``Accelerator``.
    options: EngineConfig
    #: Environment variables that are set during its construction.
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Warnings to ignore, by pattern and category, since no user can change the cause.
    ignored: tuple[tuple[str, type[Warning]], ...] = ()


# Parameters that are added to a loaded model, such as adapters: the same on every rank.


def broadcast_added(make: Callable[[], Sequence[nn.Parameter]]) -> Sequence[nn.Parameter]:
    """Call ``make``, which may be collective, and send rank 0's values to all ranks."""
    world = current_world()
    with world.collectives("broadcasting added parameters"):
        parameters = make()
        for parameter in parameters if dist.is_initialized() else ():
            if not parameter.is_meta:
                # NCCL cannot send tensors on the host: use zerostart's own group for them.
                group = world.group if parameter.device.type == "cpu" else None
                dist.broadcast(parameter.detach(), src=0, group=group)
    return parameters
