"""Memory of each rank in the load, the engine's construction and the first step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import numpy as np
import torch
from torch import nn

from zerostart.engines import Engine, Placements
from zerostart.engines.flat_buffers import MESSAGE
from zerostart.engines.forecast import (
    Array,
    Gathers,
    Hardware,
    MemoryInputs,
    MemoryPeak,
    OptimizerCost,
    ParameterBytes,
    Sizes,
)
from zerostart.engines.placements import DEVICE, HOST
from zerostart.errors import ConfigError
from zerostart.geometry.layout import Parallelism
from zerostart.loading.forecast.result import PHASES, PhaseMemory


def moments_of(
    model: nn.Module,
    engine: Engine,
    placed: Placements,
    shares: ParameterBytes,
    staged: Array | int,
    optimizer: OptimizerCost,
    target: Hardware,
) -> list[MemoryPeak]:
    """List the moments at which memory may be highest.

    ``staged`` are bytes of staging buffers on the host while reading. Activations are not
    included: they depend on the batch.
    """
    whole = placed.resident_bytes
    parameters = shares.device if whole is None else whole
    resident = {"parameters": parameters, "buffers": shares.buffers}
    loads = [MemoryPeak("load", {"parameters": shares.host, "staging": staged}, resident)]
    if placed.gathered:
        # Messages of the all-gather of flat buffers (engines/flat_buffers.py).
        loads.append(MemoryPeak("load", {}, {**resident, "staging": min(whole or 0, MESSAGE)}))
    return [*loads, *engine.memory_peaks(model, MemoryInputs(shares, optimizer, target, whole or 0))]


def peaks(moments: Iterable[MemoryPeak], ranks: int, target: Hardware) -> list[dict[str, PhaseMemory]]:
    """Return the highest memory of each rank and phase, by component."""
    # If the device is the CPU, `on` counts device memory as host memory.
    placed = [moment.on(target) for moment in moments]
    of_phase = {phase: [m for m in placed if m.phase == phase] for phase in PHASES}
    hosts = {phase: _highest([m.host for m in group], ranks) for phase, group in of_phase.items()}
    devices = {phase: _highest([m.device for m in group], ranks) for phase, group in of_phase.items()}
    # Equal ranks share one object: a big job has few kinds of ranks.
    shared: dict[tuple[int, ...], dict[str, PhaseMemory]] = {}
    memory = []
    for rank in range(ranks):
        rows = {phase: (hosts[phase][rank], devices[phase][rank]) for phase in PHASES if of_phase[phase]}
        # -1 and -2 separate host, device and phases.
        key = tuple(v for host, device in rows.values() for v in (*host.values(), -1, *device.values(), -2))
        memory.append(shared.setdefault(key, {phase: PhaseMemory(*row) for phase, row in rows.items()}))
    return memory


def _highest(sizes: Sequence[Sizes], ranks: int) -> list[dict[str, int]]:
    tables = []
    for one in sizes:
        columns = {n: np.broadcast_to(np.asarray(v, np.int64), ranks).tolist() for n, v in one.items()}
        total = sum((np.asarray(v, np.int64) for v in one.values()), np.zeros(ranks, np.int64))
        tables.append((total.tolist(), columns))
    result: list[dict[str, int]] = []
    for rank in range(ranks):
        # The moment with the highest total: highest components of different moments never exist together.
        best = max(tables, key=lambda table: table[0][rank], default=None)
        columns = {} if best is None else best[1]
        result.append({name: values[rank] for name, values in columns.items() if values[rank]})
    return result


#: Copies of the trained elements: optimizer states, then scratch of an update on the host and on the device.
OPTIMIZERS: Mapping[str, OptimizerCost] = {
    cost.name: cost
    for cost in (
        OptimizerCost("adamw", 2, 2, 1),
        OptimizerCost("adam", 2, 2, 1),
        OptimizerCost("fused_adamw", 2),
        OptimizerCost("momentum", 1),
        OptimizerCost("sgd", 0),
    )
}


def optimizer_of(name: str | None, configured: str | None) -> OptimizerCost:
    """Return the cost of the optimizer ``name``, by default the ``configured`` one or AdamW.

    Raises ConfigError for an unknown name.
    """
    name = name or configured or "adamw"
    if name not in OPTIMIZERS:
        raise ConfigError(f"optimizer={name!r} is unknown; choose one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]


def parameter_bytes(
    model: nn.Module,
    placed: Placements,
    parallelism: Parallelism,
    ranks: Sequence[int],
    numels: Mapping[str, Array],
) -> ParameterBytes:
    """Sum the shards of ``ranks``; ``numels`` has their elements by parameter name."""
    zeros = np.zeros(len(ranks), np.int64)
    homes = {DEVICE: zeros.copy(), HOST: zeros.copy()}
    # Bytes, except for ``trained`` and ``largest``: elements, as the engine knows the dtype of updates.
    storage, trained, largest = zeros.copy(), zeros.copy(), zeros.copy()
    elements: dict[torch.dtype, int] = {}
    whole: dict[str, int] = {}
    shared: dict[int, int] = {}
    for name, parameter in model.named_parameters():
        numel = numels[name]
        nbytes = numel * parameter.dtype.itemsize
        # In place: ``home`` is one of the three running sums.
        home = homes.get(placed.homes[name], storage)
        home += nbytes
        np.maximum(largest, numel, out=largest)
        # Rank 0 has as many experts as any rank.
        whole[name] = prod(parallelism.section(name, tuple(parameter.shape), 0).shape)
        if parameter.requires_grad:
            trained += numel
            elements[parameter.dtype] = elements.get(parameter.dtype, 0) + whole[name]
            sharers = parallelism.owners(name, 0)[1]
            shared[sharers] = shared.get(sharers, 0) + whole[name] * parameter.dtype.itemsize
    # A gather needs the largest parameter, and the largest module with its own parameters.
    sizes = {name: whole[name] * p.dtype.itemsize for name, p in model.named_parameters()}
    modules: dict[str, int] = {}
    for name, size in sizes.items():
        # Without the parameters of submodules, which their own forwards gather.
        owner = name.rpartition(".")[0]
        modules[owner] = modules.get(owner, 0) + size
    return ParameterBytes(
        trained=trained,
        device=homes[DEVICE],
        host=homes[HOST],
        storage=storage,
        largest=largest,
        buffers=sum(b.numel() * b.dtype.itemsize for b in model.buffers()),
        dtype=max(elements, key=lambda d: elements[d]) if elements else torch.float32,
        gathers=Gathers(
            max(sizes.values(), default=0),
            max(modules.values(), default=0),
            sum(shared.values()),
            whole,
            shared,
        ),
    )
