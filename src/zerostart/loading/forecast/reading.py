"""Count the reads of each rank: bytes, operations and staging buffers."""

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
    """Shards of one parameter. Parameters that are cut alike share one object."""

    #: Ranks that hold elements, with their layout.
    layouts: Sequence[tuple[int, Layout]]
    #: Elements of the local storage of every rank.
    numels: Array


def owned_by(model: nn.Module, placed: Placements, ranks: Sequence[int]) -> dict[str, Owned]:
    """Return the shards of ``ranks`` by parameter name; equal parameters share one object."""
    by_cut: dict[Hashable, Owned] = {}
    by_name: dict[str, Owned] = {}
    for name, parameter in model.named_parameters():
        # ``count_reads`` recognises parameters that are cut alike by the identity of the object.
        cut = (tuple(parameter.shape), placed.alike(name))
        if cut not in by_cut:
            layouts = [(rank, placed.layout(name, rank)) for rank in ranks]
            numels = np.array([layout.numel for _, layout in layouts], np.int64)
            by_cut[cut] = Owned([(rank, layout) for rank, layout in layouts if layout.boxes], numels)
        by_name[name] = by_cut[cut]
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
    """Count the reads of each of ``ranks``; ``on_host``: device memory is host memory."""
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
    """Replace ``assumed`` rates by those of the user, in bytes a second.

    ``storage`` is the rate of one machine from its disk or over its link. Raises ConfigError.
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
    """Add to each rank the seconds to read, and to receive ``gathered`` bytes.

    Bytes that several ranks of a machine need are read once from storage, through its page cache. ``stored``
    are the bytes of the files, infinite without a page cache. Storage, copies and messages overlap: the
    slowest counts.
    """
    local = min(world_size, RANKS_OF_A_MACHINE)
    total = sum(rank.read_bytes for rank in ranks) * local / max(1, len(ranks))
    cached = min(1.0, stored / total) if total else 1.0
    # Twice: on average a rank sends as many bytes as it receives, one after the other.
    messages = 2 * gathered / rates.interconnect

    def seconds(rank: RankForecast) -> float:
        of_machine = rank.read_bytes * local
        return max(of_machine * cached / rates.link, of_machine / rates.copy, messages)

    return tuple(replace(rank, read_seconds=seconds(rank)) for rank in ranks)
