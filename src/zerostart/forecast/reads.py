"""What each rank of a load will read: bytes, operations, and what is staged on the way."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from torch import nn

from zerostart.checkpoint.catalog import Catalog
from zerostart.engines.memory import Array
from zerostart.engines.placements import DEVICE, Placements
from zerostart.layout import replicated
from zerostart.models import Origins
from zerostart.planning import (
    Count,
    Destination,
    PlanOptions,
    Runs,
    Share,
    count_reads,
    join,
    runs_of,
)
from zerostart.recipe import Recipe
from zerostart.transfer import Tuning

__all__ = ["Owned", "counts_of", "owned_by"]


@dataclass(frozen=True)
class Owned:
    """A parameter's share on every rank in question: its runs, and the elements of its local storage."""

    runs: Runs
    numels: Array


def owned_by(model: nn.Module, placed: Placements, ranks: Sequence[int]) -> dict[str, Owned]:
    """The shares of ``ranks``, by parameter name.

    Layers repeat: parameters that are cut alike and have one shape lie alike, and are laid out once.
    """
    known: dict[Hashable, Owned] = {}
    by_name: dict[str, Owned] = {}
    for name, parameter in model.named_parameters():
        alike = (tuple(parameter.shape), placed.alike(name))
        if alike not in known:
            layouts = [(r, placed.layout(name, r)) for r in ranks]
            known[alike] = Owned(runs_of(layouts), np.array([lay.numel for _, lay in layouts], np.int64))
        by_name[name] = known[alike]
    return by_name


def counts_of(
    catalog: Catalog,
    origins: Origins,
    placed: Placements,
    owned: Mapping[str, Owned],
    ranks: Sequence[int],
    tuning: Tuning,
    on_host: bool,
) -> list[Count]:
    """What each of ``ranks`` (ascending) reads; ``on_host``: what the device has is host memory."""
    shares = [Share(r, _all_of(r, ranks), on_host) for r in origins.buffers.values()]
    for name, own in owned.items():
        recipe = origins.parameters[name]
        if isinstance(recipe, Recipe):
            shares.append(Share(recipe, own.runs, on_host or placed.homes[name] != DEVICE))
    options = PlanOptions(tuning.chunk_size)
    # All ranks' reads at once where that can be; else, and for one rank alone, by planning.
    if len(ranks) > 1:
        counts = count_reads(catalog, shares, ranks[-1] + 1, options)
        if counts is not None:
            return [counts[rank] for rank in ranks]
    return [_planned(catalog, shares, placed, rank, options, tuning.threads) for rank in ranks]


def _all_of(recipe: Recipe, ranks: Sequence[int]) -> Runs:
    numel = prod(recipe.target.shape)
    return np.array([(0, numel, rank, 0) for rank in ranks if numel], np.int64).reshape(-1, 4).T


def _planned(
    catalog: Catalog,
    shares: Sequence[Share],
    placed: Placements,
    rank: int,
    options: PlanOptions,
    threads: int,
) -> Count:
    """One rank's reads, by planning them."""
    wanted = []
    for share in shares:
        target = share.recipe.target
        layout = replicated(target.shape) if target.buffer else placed.layout(target.name, rank)
        destination = Destination(target.name, layout.numel, layout.owned, target.dtype, share.direct)
        wanted.append((share.recipe, layout, destination))
    plan = join(catalog, wanted, options)
    reads = sum(1 for _ in plan.all_reads())
    return Count(plan.read_bytes, reads, plan.staged, plan.scratch_bytes(threads))
