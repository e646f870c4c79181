"""What each rank of a load will read: bytes, operations, and what is staged on the way."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
from torch import nn

from zerostart.checkpoint.catalog import Catalog
from zerostart.engines.forecast import Array
from zerostart.engines.placements import DEVICE, Placements
from zerostart.geometry.layout import Layout, replicated
from zerostart.models import Origins
from zerostart.recipe import Recipe
from zerostart.transfer import Tuning
from zerostart.transfer.planning import Count, PlanOptions, Share, count_reads


@dataclass(frozen=True)
class Owned:
    """A parameter's share on every rank in question: the layouts of those that hold some of it, with the
    ranks, and the elements of the local storage of all.

    Parameters that lie alike have the very same ``layouts``.
    """

    layouts: Sequence[tuple[int, Layout]]
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
            layouts = [(rank, placed.layout(name, rank)) for rank in ranks]
            numels = np.array([layout.numel for _, layout in layouts], np.int64)
            known[alike] = Owned([(rank, layout) for rank, layout in layouts if layout.boxes], numels)
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
    """What each of ``ranks`` reads; ``on_host``: what the device has is host memory."""
    whole: dict[tuple[int, ...], list[tuple[int, Layout]]] = {}
    shares = []
    for recipe in origins.buffers.values():
        shape = recipe.target.shape
        layouts = whole.setdefault(shape, [*zip(ranks, repeat(replicated(shape)))])
        shares.append(Share(recipe, layouts, on_host))
    for name, own in owned.items():
        origin = origins.parameters[name]
        if isinstance(origin, Recipe):
            shares.append(Share(origin, own.layouts, on_host or placed.homes[name] != DEVICE))
    return count_reads(catalog, shares, ranks, PlanOptions(tuning.chunk_size), tuning.threads)
