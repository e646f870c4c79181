"""What each rank of a load will read: bytes, operations, and what is staged on the way."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import numpy as np
from torch import nn

from zerostart.checkpoint.catalog import Catalog
from zerostart.engines.forecast import Array
from zerostart.engines.placements import DEVICE, RANKS_OF_A_MACHINE, Placements
from zerostart.errors import ConfigError
from zerostart.geometry.layout import Layout, replicated
from zerostart.loading.forecast.result import RankForecast
from zerostart.models import Origins
from zerostart.recipe import Recipe
from zerostart.transfer import Tuning
from zerostart.transfer.planning import Count, Share, count_reads
from zerostart.transfer.tuning import Rates


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
        # Parameters that lie alike share one object, by whose identity ``count_reads`` knows that they are
        # cut alike.
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
    return count_reads(catalog, shares, ranks, tuning.options(), tuning.threads)


def rates_of(assumed: Rates, storage: float | None, interconnect: float | None) -> Rates:
    """Replace ``assumed`` rates by those that are given, in bytes a second.

    ``storage`` is what one machine gets from its disk or over its link. Raises ConfigError for no rate.
    """
    for name, value in (("storage_rate", storage), ("interconnect_rate", interconnect)):
        if value is not None and not (isinstance(value, float | int) and 0 < value < math.inf):
            raise ConfigError(f"{name}={value!r} must be a number of bytes a second")
    link = assumed.link if storage is None else float(storage)
    return replace(
        assumed, link=link, interconnect=assumed.interconnect if interconnect is None else float(interconnect)
    )


def timed(
    ranks: Sequence[RankForecast], world_size: int, gathered: int, stored: float, rates: Rates
) -> tuple[RankForecast, ...]:
    """Add to each rank the seconds to read, and to receive ``gathered`` bytes from other ranks.

    A machine's page cache gives bytes that several of its ranks want only once from storage; ``stored`` are
    the bytes of the files, infinite without a page cache. The slowest of storage, copies and messages counts:
    they overlap.
    """
    local = min(world_size, RANKS_OF_A_MACHINE)
    wanted = sum(rank.read_bytes for rank in ranks) * local / max(1, len(ranks))
    differ = min(1.0, stored / wanted) if wanted else 1.0
    # Twice: on the mean a rank sends as many bytes as it receives, in turns.
    messages = 2 * gathered / rates.interconnect

    def seconds(rank: RankForecast) -> float:
        of_machine = rank.read_bytes * local
        return max(of_machine * differ / rates.link, of_machine / rates.copy, messages)

    return tuple(replace(rank, read_seconds=seconds(rank)) for rank in ranks)
