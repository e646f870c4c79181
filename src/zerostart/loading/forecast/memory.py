"""The memory of each rank through the load, the engine's construction, and the first step."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from torch import nn

from zerostart.engines import Engine, Placements
from zerostart.engines.flat_buffers import MESSAGE
from zerostart.engines.forecast import Array, MemoryPeak, OptimizerCost, ParameterBytes, Target
from zerostart.geometry.layout import Parallelism
from zerostart.loading.forecast.shares import held_of


def held_alone(
    model: nn.Module, placed: Placements, parallelism: Parallelism, ranks: Sequence[int]
) -> ParameterBytes:
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
    engine: Engine,
    placed: Placements,
    held: ParameterBytes,
    staged: Array | int,
    optimizer: OptimizerCost,
    target: Target,
) -> list[MemoryPeak]:
    """All moments that may be the highest; ``staged`` are bytes on the host beside the shards while reading.

    Activations are not among them: they depend on the batch.
    """
    whole = placed.held
    shards = held.device if whole is None else whole
    resident = {"parameters": shards, "buffers": held.buffers}
    loads = [MemoryPeak("load", {"parameters": held.host, "staging": staged}, resident)]
    if placed.gathered:
        # The all-gather of shares of flat buffers, message by message (engines/flat_buffers.py).
        loads.append(MemoryPeak("load", {}, {**resident, "staging": min(whole or 0, MESSAGE)}))
    return [*loads, *engine.memory_peaks(model, placed, held, optimizer, target)]
