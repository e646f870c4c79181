"""The whole forecast: what is read, what is held, how long it takes, and whether it fits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from zerostart.checkpoint.catalog import Catalog
from zerostart.engines import Engine
from zerostart.engines.forecast import Target
from zerostart.loading.arguments import ForecastArguments
from zerostart.loading.forecast.advice import advice, fits_of
from zerostart.loading.forecast.exchange import Foreseen
from zerostart.loading.forecast.limits import Limits
from zerostart.loading.forecast.memory import moments_of
from zerostart.loading.forecast.moments import peaks
from zerostart.loading.forecast.optimizers import optimizer_of
from zerostart.loading.forecast.reads import counts_of, owned_by
from zerostart.loading.forecast.result import Memory, RankForecast, WorldPlan
from zerostart.loading.forecast.seconds import rates_of, timed
from zerostart.loading.forecast.shares import held_of
from zerostart.models import Origins
from zerostart.recipe import Coverage, Recipes
from zerostart.transfer import Tuning
from zerostart.transfer.planning import Count, Rates


@dataclass(frozen=True)
class Subject:
    """What is loaded: all that is known of it before anything is sharded."""

    catalog: Catalog
    model: nn.Module
    recipes: Recipes
    coverage: Coverage
    origins: Origins


def foresee(
    subject: Subject,
    engine: Engine,
    ranks: Sequence[int],
    tuning: Tuning,
    asked: ForecastArguments,
    forced: bool | None,
) -> WorldPlan:
    """The plan of ``ranks``; ``forced``: whether bytes that several want must be read once.

    Raises ConfigError for arguments out of range, or an exchange that does not fit into the memory limit.
    """
    limits = Limits.of(asked.device_memory, asked.host_memory, engine.mesh.world_size)
    rates = rates_of(tuning.rates, asked.storage_rate, asked.interconnect_rate)
    optimizer = optimizer_of(asked.optimizer, engine.configured_optimizer)
    target = Target(limits.accelerator, engine.mesh.world_size)
    model, parallelism = subject.model, engine.parallelism(subject.model)
    placed = engine.placements(model, parallelism)
    twins = {rank: placed.twin(rank) for rank in ranks}
    shown = sorted(set(twins.values()))
    owned = owned_by(model, placed, shown)
    held = held_of(model, placed, parallelism, shown, {name: own.numels for name, own in owned.items()})
    counts = counts_of(subject.catalog, subject.origins, placed, owned, shown, tuning, not target.accelerator)
    staged = [(tuning.ring_bytes if count.staged else 0) + count.scratch for count in counts]
    moments = moments_of(model, engine, placed, held, np.array(staged, np.int64), optimizer, target)
    memory = dict(zip(shown, peaks(moments, len(shown), target), strict=True))
    resident = (held.device if placed.held is None else placed.held) + held.buffers + 0 * held.trained
    on_device = dict(zip(shown, resident.tolist(), strict=True))
    read = dict(zip(shown, counts, strict=True))
    made = WorldPlan.of(
        subject.catalog,
        subject.recipes,
        subject.coverage,
        engine.name,
        engine.mesh.world_size,
        [_of_rank(rank, read[twin], on_device[twin], memory[twin]) for rank, twin in twins.items()],
        0.0,
    )
    foreseen = Foreseen(subject.catalog, subject.origins, placed, tuning, rates, not target.accelerator)
    made = foreseen.exchanged(made, forced)
    fits = fits_of([rank.memory for rank in made.ranks], limits, made.world_size)
    return replace(
        made,
        ranks=timed(made.ranks, made.exchanged_bytes, made.world_size, subject.catalog.storage.nbytes, rates),
        zero_stage=engine.zero_stage,
        tier=placed.residence,
        optimizer=optimizer.name,
        accelerator=limits.accelerator,
        rates=_shown(rates),
        fits=fits,
        advice=()
        if all(fit.fits for fit in fits)
        else advice(model, engine, max(staged, default=0), optimizer, limits),
    )


def _of_rank(rank: int, read: Count, device_bytes: int, memory: Mapping[str, Memory]) -> RankForecast:
    return RankForecast(
        rank=rank,
        read_bytes=read.nbytes,
        read_ops=read.reads,
        device_bytes=device_bytes,
        peak_host_bytes=memory["load"].host_bytes,
        peak_device_bytes=memory["load"].device_bytes,
        memory=memory,
    )


def _shown(rates: Rates) -> dict[str, float | None]:
    """The rates as plain data: what does not limit is None."""
    named = {"storage": rates.link, "copy": rates.copy, "interconnect": rates.interconnect}
    return {name: None if math.isinf(rate) else rate for name, rate in named.items()}
