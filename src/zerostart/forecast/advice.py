"""The smallest change with which a job fits, found by forecasting the memory of variations of it.

Variations come in the order in which they cost least: staging buffers, the reduction bucket, the states on
the host, a higher stage, parameters on the host, more ranks, and at last more ranks with all of that. One
rank stands for all: no rank holds more than the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from zerostart.engines.deepspeed.settings import ZeroSettings
from zerostart.engines.placements import RANKS_OF_A_MACHINE
from zerostart.errors import ZerostartError
from zerostart.forecast.limits import Fit, Limits
from zerostart.forecast.memory import Job, held_alone, moments_of
from zerostart.forecast.moments import Target, peaks
from zerostart.forecast.optimizers import Optimizer
from zerostart.forecast.result import Memory
from zerostart.forecast.zero_config import ZeroCosts
from zerostart.layout import Mesh

__all__ = ["advice", "fits_of"]

#: Most ranks that are advised, as a multiple of those that are planned.
MOST = 64
#: Elements of a reduction bucket that still makes messages of a good size; DeepSpeed's own is ten times that.
BUCKET = 50_000_000
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


def advice(model: nn.Module, job: Job, staged: int, optimizer: Optimizer, limits: Limits) -> tuple[str, ...]:
    """The first change that makes the job fit, in words; or that none of those known here does.

    ``staged`` are bytes on the host beside the shards while reading.
    """
    for words, changed in _changes(job, limits):
        target = Target(limits.accelerator, changed.mesh.world_size)
        try:
            placed, parallelism = changed.placed(model)
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


def _changes(job: Job, limits: Limits) -> Iterator[tuple[list[str], Job]]:
    """What differs, and the job with it: at first nothing."""
    told: list[str] = []
    best = job
    yield told, job
    for told, best in _variations(job, limits):
        yield told, best
    for start, words in ((job, []), (best, told)):
        for size in _sizes(start.mesh.world_size):
            mesh = Mesh(size, start.mesh.expert_parallel, start.mesh.tensor_parallel)
            yield [f"{size} ranks", *words], replace(start, mesh=mesh)


def _sizes(world_size: int) -> list[int]:
    """Twice the ranks, and so on up to `MOST` times."""
    return [world_size << power for power in range(1, MOST.bit_length())]


def _variations(job: Job, limits: Limits) -> Iterator[tuple[list[str], Job]]:
    """Other settings for the same number of ranks, each on top of those before: what differs, and the job."""
    if job.engine == "deepspeed":
        yield from _of_deepspeed(job, limits)
    else:
        yield from _of_fsdp2(job, limits)


def _of_deepspeed(job: Job, limits: Limits) -> Iterator[tuple[list[str], Job]]:
    words: list[str] = []
    costs = ZeroCosts.of(job.engine_config)
    if costs.bucket > BUCKET:
        job = _with(job, reduce_bucket_size=BUCKET)
        words = [f"reduce_bucket_size={BUCKET}"]
        yield words, job
    offloads = limits.accelerator  # on the CPU, to offload is to stay
    if offloads and costs.optimizer_home == "none":
        job = _with(job, offload_optimizer={"device": "cpu"})
        words = ["offload_optimizer to cpu", *words]
        yield words, job
    aside = words
    for stage in range(job.zero_stage + 1, 4):
        job = replace(_with(job, stage=stage), zero_stage=stage)
        words = [f"zero_stage={stage}", *aside]
        yield words, job
    if offloads and ZeroSettings.of(job.engine_config).offload == "none":
        job = _with(job, offload_param={"device": "cpu"})
        yield ["offload_param to cpu", *words], job


def _of_fsdp2(job: Job, limits: Limits) -> Iterator[tuple[list[str], Job]]:
    config = dict(job.engine_config or {})
    words: list[str] = []
    if job.zero_stage < 3:
        words, job = ["zero_stage=3"], replace(job, zero_stage=3)
        yield words, job
    if config.get("reshard_after_forward") is False:
        config = {**config, "reshard_after_forward": True}
        words = ["reshard_after_forward=True", *words]
        yield words, replace(job, engine_config=config)
    if limits.accelerator and config.get("offload_policy") is None:
        # Pinning needs an accelerator, which the machine that plans may lack.
        config = {**config, "offload_policy": CPUOffloadPolicy(pin_memory=False)}
        yield ["offload_policy=CPUOffloadPolicy()", *words], replace(job, engine_config=config)


def _with(job: Job, **settings: Any) -> Job:
    config = dict(job.engine_config or {})
    config["zero_optimization"] = {**(config.get("zero_optimization") or {}), **settings}
    return replace(job, engine_config=config)
