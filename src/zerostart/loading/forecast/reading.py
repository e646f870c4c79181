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
from zerostart.loading.forecast.result import Memory, RankForecast, WorldPlan
from zerostart.models import Origins
from zerostart.recipe import Recipe
from zerostart.transfer import Tuning
from zerostart.transfer.collective import Group, ReadDemand, choose_strategy, find_groups, read_by_place
from zerostart.transfer.planning import Count, Destination, Read, Share, count_reads, join
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


@dataclass(frozen=True)
class Foreseen:
    """What decides it: the checkpoint, what is read of it, where it goes, and how it is read.

    ``on_host``: what the device has is host memory.
    """

    catalog: Catalog
    origins: Origins
    placed: Placements
    tuning: Tuning
    on_host: bool

    def exchanged(
        self, made: WorldPlan, exchange: bool | None, owned: Mapping[str, Owned], shown: Sequence[int]
    ) -> WorldPlan:
        """The plan ``made`` for own slices, as it is or as it becomes if replicas read for each other.

        ``owned`` are the shares of the ranks ``shown``, one of each kind. Raises ConfigError as
        ``collective.choose_strategy`` does.
        """
        if self.placed.gathered:
            # Bytes of flat buffers that ranks gather from each other anyway, whoever reads what.
            made = replace(made, exchanged_bytes=(self.placed.gathered,) * len(made.ranks))
        storage = self.catalog.storage
        if made.world_size == 1 or not storage.worth_exchanging:
            return made
        # Ranks are laid on machines of ``RANKS_OF_A_MACHINE``; their numbers stand for names.
        machines = [str(rank // RANKS_OF_A_MACHINE) for rank in range(made.world_size)]
        strategy = choose_strategy(
            [ReadDemand.of(storage, self.tuning, exchange, machine) for machine in machines]
        )
        made = replace(made, sharing=str(strategy))
        return self._shared(made, strategy.chunk_size, owned, shown) if strategy.exchange else made

    def _shared(
        self, made: WorldPlan, chunk: int, owned: Mapping[str, Owned], shown: Sequence[int]
    ) -> WorldPlan:
        tuning, world = replace(self.tuning, chunk_size=chunk), range(made.world_size)
        # 1. What each rank reads for itself, and what groups of ranks share.
        plain = [name for name, recipe in self.origins.buffers.items() if not recipe.computed]
        shared: dict[Group, list[str]] = {tuple(world): plain}
        alone: dict[str, Owned] = {}
        known: dict[int, tuple[Owned, list[Group]]] = {}
        for name, own in owned.items():
            recipe = self.origins.parameters[name]
            if not isinstance(recipe, Recipe) or recipe.computed:
                alone[name] = own
                continue
            # Parameters that lie alike have one object, by which ``count_reads`` knows them.
            if id(own) not in known:
                layouts = (self.placed.layout(name, rank) for rank in world)
                groups = find_groups([[layout] if layout.boxes else [] for layout in layouts])
                mine = [(rank, layout) for rank, layout in own.layouts if len(groups[layout]) == 1]
                several = [group for group in groups.values() if len(group) > 1]
                known[id(own)] = Owned(mine, own.numels), several
            alone[name], several = known[id(own)]
            for group in several:
                shared.setdefault(group, []).append(name)
        buffers = {name: recipe for name, recipe in self.origins.buffers.items() if recipe.computed}
        origins = replace(self.origins, buffers=buffers)
        counts = counts_of(self.catalog, origins, self.placed, alone, shown, tuning, self.on_host)
        # 2. The share of each rank in the reads of its groups.
        reads: dict[int, list[Read]] = {rank: [] for rank in world}
        received = dict.fromkeys(world, 0)
        for group, names in shared.items():
            every = self._reads(group, names, tuning)
            for rank, own_reads in zip(group, read_by_place(every, chunk, len(group)), strict=True):
                reads[rank] += own_reads
                received[rank] += sum(r.nbytes for r in every) - sum(r.nbytes for r in own_reads)
        of_twin, ranks = dict(zip(shown, counts, strict=True)), list[RankForecast]()
        for one in made.ranks:
            count, own_reads = of_twin[self.placed.twin(one.rank)], reads[one.rank]
            # The staging of own slices goes, that of the exchange comes.
            more = tuning.exchange_bytes(chunk) - one.memory["load"].host.get("staging", 0)
            ranks.append(
                replace(
                    one,
                    read_bytes=count.nbytes + sum(read.nbytes for read in own_reads),
                    read_ops=count.reads + len(own_reads),
                    peak_host_bytes=one.peak_host_bytes + more,
                    memory=_staging(one.memory, more),
                )
            )
        return replace(made, ranks=tuple(ranks), exchanged_bytes=tuple(received[one.rank] for one in ranks))

    def _reads(self, group: Group, names: Sequence[str], tuning: Tuning) -> Sequence[Read]:
        wanted = []
        for name in names:
            if name in self.origins.buffers:
                recipe: object = self.origins.buffers[name]
                assert isinstance(recipe, Recipe)
                layout, on_host = replicated(recipe.target.shape), self.on_host
            else:
                recipe, layout = self.origins.parameters[name], self.placed.layout(name, group[0])
                on_host = self.on_host or self.placed.homes[name] != DEVICE
            assert isinstance(recipe, Recipe), "only what is read is shared"
            target = recipe.target
            at = Destination(target.name, layout.numel, layout.owned, target.dtype, on_host)
            wanted.append((recipe, layout, at))
        return join(self.catalog, wanted, tuning.options()).reads


def _staging(memory: Mapping[str, Memory], more: int) -> dict[str, Memory]:
    """``memory`` with so many bytes ``more`` of staging buffers in the load."""
    load = memory["load"]
    host = {**load.host, "staging": load.host.get("staging", 0) + more}
    return {**memory, "load": replace(load, host=host)}


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


def timed(made: WorldPlan, stored: float, rates: Rates) -> tuple[RankForecast, ...]:
    """Add to each rank the seconds that it reads and exchanges; ``stored`` are the bytes of the files.

    A machine's page cache gives bytes that several of its ranks want only once from storage; ``stored`` is
    infinite where there is none. The slowest of storage, copies and messages counts: they overlap.
    """
    local = min(made.world_size, RANKS_OF_A_MACHINE)
    wanted = sum(rank.read_bytes for rank in made.ranks) * local / max(1, len(made.ranks))
    differ = min(1.0, stored / wanted) if wanted else 1.0
    ranks = []
    for rank, received in zip(made.ranks, made.exchanged_bytes or [0] * len(made.ranks), strict=True):
        of_machine = rank.read_bytes * local
        # Twice: on the mean a rank sends as much as it gets, in turns.
        messages = 2 * received / rates.interconnect
        seconds = max(of_machine * differ / rates.link, of_machine / rates.copy, messages)
        ranks.append(replace(rank, read_seconds=seconds))
    return tuple(ranks)
