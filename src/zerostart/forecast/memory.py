"""The memory of each rank through the load, the engine's construction, and the first step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from zerostart import engines
from zerostart.engines import Placements
from zerostart.engines.flat_buffers import MESSAGE
from zerostart.engines.fsdp2.settings import FSDP2Settings
from zerostart.forecast import fsdp2, zero0, zero3, zero12
from zerostart.forecast.moments import Moment, Target
from zerostart.forecast.optimizers import Optimizer
from zerostart.forecast.shares import Array, Held, held_of
from zerostart.forecast.zero_config import ZeroCosts
from zerostart.layout import Mesh, Parallelism

__all__ = ["Job", "held_alone", "moments_of"]


@dataclass(frozen=True)
class Job:
    """How a model is trained: the arguments of a load that decide who holds what."""

    engine: str
    zero_stage: int
    engine_config: Mapping[str, Any] | None
    mesh: Mesh
    exchange: bool | None = None

    @property
    def flat(self) -> bool:
        """Whether parameters are whole on every rank, in flat buffers."""
        return engines.keeps_whole(self.engine, self.zero_stage)

    def placed(self, model: nn.Module) -> tuple[Placements, Parallelism]:
        """Where the parameters of ``model`` go; raises ConfigError or EngineError as a load does."""
        parallelism = engines.resolve(model, self.engine, self.mesh, self.engine_config)
        placed = engines.planned(
            self.engine, self.engine_config, model, parallelism, self.zero_stage, self.exchange
        )
        return placed, parallelism


def held_alone(model: nn.Module, placed: Placements, parallelism: Parallelism, ranks: Sequence[int]) -> Held:
    """What ``ranks`` hold, for memory alone: without what they read."""
    known: dict[Hashable, Array] = {}
    numels: dict[str, Array] = {}
    for name, parameter in model.named_parameters():
        alike = (tuple(parameter.shape), placed.alike(name))
        if alike not in known:
            known[alike] = np.array([placed.layout(name, rank).numel for rank in ranks], np.int64)
        numels[name] = known[alike]
    return held_of(model, placed, parallelism, ranks, numels)


def moments_of(
    model: nn.Module,
    job: Job,
    placed: Placements,
    held: Held,
    staged: Array | int,
    optimizer: Optimizer,
    target: Target,
) -> list[Moment]:
    """All moments that may be the highest; ``staged`` are bytes on the host beside the shards while reading.

    Activations are not among them: they depend on the batch.
    """
    whole = placed.held
    shards = held.device if whole is None else whole
    resident = {"parameters": shards, "buffers": held.buffers}
    loads = [Moment("load", {"parameters": held.host, "staging": staged}, resident)]
    if placed.gathered:
        # The all-gather of shares of flat buffers, message by message (engines/whole.py).
        loads.append(Moment("load", {}, {**resident, "staging": min(whole or 0, MESSAGE)}))
    if job.zero_stage == 0:
        return [*loads, *zero0.after_load(held, whole or 0, optimizer, target, job.engine)]
    if job.engine != "deepspeed":
        settings = FSDP2Settings.of(job.engine_config).at_stage(job.zero_stage)
        units = fsdp2.Units.of(model, settings, held, target.world_size)
        return [*loads, *fsdp2.after_load(held, units, optimizer, target)]
    costs = ZeroCosts.of(job.engine_config)
    if whole is not None:
        return [*loads, *zero12.after_load(held, whole, costs, optimizer, target, job.zero_stage)]
    return [*loads, *zero3.after_load(held, costs, optimizer, target)]
