"""The smallest change with which a job fits, found by forecasting the memory of variations of it.

Variations come in the order in which they cost least: staging buffers, the reduction bucket, the states on
the host, a higher stage, parameters on the host, more ranks, and at last more ranks with all of that. One
rank stands for all: no rank holds more than the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from zerostart.engines import RANKS_OF_A_MACHINE, Engine
from zerostart.engines.forecast import OptimizerCost, Target
from zerostart.errors import ZerostartError
from zerostart.loading.forecast.limits import Fit, Limits
from zerostart.loading.forecast.memory import held_alone, moments_of
from zerostart.loading.forecast.moments import peaks
from zerostart.loading.forecast.result import Memory

#: Most ranks that are advised, as a multiple of those that are planned.
MOST = 64
#: Bytes of staging buffers with which reading is still fast.
SMALL = 1 << 20


def fits_of(memory: Sequence[Mapping[str, Memory]], limits: Limits, world_size: int) -> tuple[Fit, ...]:
    """How the highest peaks of all ranks compare with the limits that are known."""
    local = min(world_size, RANKS_OF_A_MACHINE)
    found = []
    for where, limit, ranks in (("device", limits.device, 1), ("host", limits.host, local)):
        of_phase = {
            phase: max(getattr(rank[phase], f"{where}_bytes") for rank in memory)
            for phase in (memory[0] if memory else ())
        }
        if limit is None or not of_phase or (where == "device" and not limits.accelerator):
            continue
        phase = max(of_phase, key=lambda name: of_phase[name])
        found.append(Fit(where, limit, of_phase[phase] * ranks, phase, ranks, limits.found))
    return tuple(found)


def advice(
    model: nn.Module, engine: Engine, staged: int, optimizer: OptimizerCost, limits: Limits
) -> tuple[str, ...]:
    """The first change that makes the job fit, in words; or that none of those known here does.

    ``staged`` are bytes on the host beside the shards while reading.
    """
    for words, changed in _changes(engine, limits):
        target = Target(limits.accelerator, changed.mesh.world_size)
        try:
            changed.check()
            changed.check_mesh()
            parallelism = changed.parallelism(model)
            placed = changed.placements(model, parallelism)
            held = held_alone(model, placed, parallelism, [0])
        except ZerostartError:  # a configuration that no load can serve is no advice
            continue
        for buffers in (staged, min(staged, SMALL)):
            moments = moments_of(model, changed, placed, held, buffers, optimizer, target)
            fits = fits_of(peaks(moments, 1, target), limits, target.world_size)
            if all(fit.fits for fit in fits):
                told = [*words, *([f"memory_limit={SMALL}"] if buffers < staged else [])]
                room = ", ".join(f"{fit.needed / fit.limit:.0%} of the {fit.where} memory" for fit in fits)
                return (f"{' and '.join(told)} (then {room})",)
    return (
        f"no change known here makes it fit, {MOST} times the ranks included: give each rank more memory",
    )


def _changes(engine: Engine, limits: Limits) -> Iterator[tuple[list[str], Engine]]:
    """What differs, and the engine with it: at first nothing."""
    told: list[str] = []
    best = engine
    yield told, engine
    for told, best in engine.relaxations(limits.accelerator):
        yield told, best
    for start, words in ((engine, []), (best, told)):
        for size in _sizes(start.mesh.world_size):
            mesh = replace(start.mesh, world_size=size)
            yield [f"{size} ranks", *words], replace(start, mesh=mesh)


def _sizes(world_size: int) -> list[int]:
    """Twice the ranks, and so on up to `MOST` times."""
    return [world_size << power for power in range(1, MOST.bit_length())]
