"""What each rank of a load will read: bytes, operations, and what is staged on the way."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
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
from zerostart.transfer.collective import ReadDemand, chosen
from zerostart.transfer.planning import (
    MARGIN,
    Count,
    Destination,
    ExchangeStep,
    Machines,
    Plan,
    Rates,
    Read,
    ReadStrategy,
    Routes,
    Share,
    Tables,
    count_reads,
    exchange_schedule,
    in_rounds,
    join,
    spans_within,
    table_of,
)


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
    """What decides it: the checkpoint, what is read of it, where it goes, how it is read and at what rates.

    ``on_host``: what the device has is host memory.
    """

    catalog: Catalog
    origins: Origins
    placed: Placements
    tuning: Tuning
    rates: Rates
    on_host: bool

    def exchanged(self, made: WorldPlan, exchange: bool | None) -> WorldPlan:
        """The plan ``made`` for own slices, as it is or as it becomes if bytes are read once.

        Raises ConfigError as ``serving.agree_on_strategy`` does.
        """
        if self.placed.gathered:
            # Bytes of flat buffers that ranks gather from each other anyway, whoever reads what.
            made = replace(made, exchanged_bytes=(self.placed.gathered,) * len(made.ranks))
        if made.world_size == 1 or not self.catalog.storage.worth_exchanging or exchange is False:
            return made
        cached = self.catalog.storage.cached and made.world_size <= RANKS_OF_A_MACHINE
        if exchange is None and (cached or not self.tuning.cold):
            return made  # one machine's page cache serves all its ranks
        # Planning every rank is what this saves: thousands of ranks would take minutes.
        if exchange is None and self._plainly_own(made):
            return made
        # Of all ranks, whichever were asked for: who reads what for whom depends on each. Those that hold
        # alike have one plan.
        plans = self._plans(made.world_size, self.tuning.chunk_size)
        strategy = chosen(self._wants(plans, exchange), sum(self.catalog.sizes))
        if strategy is None or not strategy.once:
            return replace(made, sharing=strategy)
        return self._once(made, strategy, plans)

    def _plainly_own(self, made: WorldPlan) -> bool:
        """Whether own slices are sure to be chosen, found without planning every rank's reads."""
        of_all = made.world_size / len(made.ranks)
        # Reading once cannot be faster by the margin where hardly a byte is wanted twice, and whole rows are.
        wanted = of_all * sum(rank.read_bytes for rank in made.ranks)
        if wanted * MARGIN > min(wanted, sum(self.catalog.sizes)):
            return False
        return all(read.rows == 1 for read in self._plan(0, self.tuning.chunk_size).all_reads())

    def _wants(self, plans: Sequence[Plan], exchange: bool | None) -> list[ReadDemand]:
        told: dict[int, ReadDemand] = {}
        for plan in plans:
            if id(plan) not in told:
                told[id(plan)] = replace(ReadDemand.of(plan, self.tuning, exchange), rates=self.rates)
        # Ranks are laid on machines of ``RANKS_OF_A_MACHINE``; their numbers stand for names.
        return [
            replace(told[id(plan)], machine=str(rank // RANKS_OF_A_MACHINE))
            for rank, plan in enumerate(plans)
        ]

    def _once(self, made: WorldPlan, strategy: ReadStrategy, own: Sequence[Plan]) -> WorldPlan:
        chunk, storage = strategy.chunk_size, self.catalog.storage
        plans = self._plans(made.world_size, chunk, lambda plan: spans_within(plan, chunk))
        machines = Machines.of([rank // RANKS_OF_A_MACHINE for rank in range(made.world_size)])
        different = {id(plan): plan for plan in plans}
        rounds = {
            key: in_rounds(plan.reads, storage.sizes, strategy.rounds) for key, plan in different.items()
        }
        served: list[list[int]] = [[] for _ in plans]
        alone: list[list[Read]] = [[] for _ in plans]
        messages: Counter[tuple[int, int]] = Counter()
        for number in range(strategy.rounds):
            # The very schedule that the ranks of a load would make, from the same tables.
            by_plan = {key: table_of(reads[number]) for key, reads in rounds.items()}
            tables = Tables.of([by_plan[id(plan)] for plan in plans])
            schedule = exchange_schedule(tables, chunk)
            for step in schedule.steps:
                if isinstance(step, ExchangeStep):
                    _, begin, end = step.extent
                    served[step.server].append(end - begin)
            for rank, numbers in enumerate(schedule.alone):
                reads = rounds[id(plans[rank])][number]
                alone[rank] += [reads[n] for n in numbers]
            messages.update(Routes(tables, machines).messages(schedule.steps))
        received = [0] * len(plans)
        for (_, to), nbytes in messages.items():
            received[to] += nbytes

        def becomes(rank: RankForecast) -> RankForecast:
            number, plan = rank.rank, plans[rank.rank]
            computed = [read for computation in plan.computations for read in computation.reads]
            by_itself = [*alone[number], *computed]
            # The staging of own slices goes, that of the exchange comes.
            staged = self.tuning.ring_bytes if own[number].staged else 0
            more = self.tuning.exchange_bytes(chunk) - staged
            return replace(
                rank,
                read_bytes=sum(read.nbytes for read in by_itself) + sum(served[number]),
                read_ops=len(by_itself) + len(served[number]),
                peak_host_bytes=rank.peak_host_bytes + more,
                memory=_staging(rank.memory, more),
            )

        return replace(
            made,
            ranks=tuple(map(becomes, made.ranks)),
            sharing=strategy,
            exchanged_bytes=tuple(received[rank.rank] for rank in made.ranks),
        )

    def _plans(
        self, world_size: int, chunk_size: int, made_of: Callable[[Plan], Plan] = lambda plan: plan
    ) -> list[Plan]:
        """What is ``made_of`` the plan of each rank: one object for ranks that hold alike."""
        known: dict[Hashable, Plan] = {}
        plans = []
        for rank in range(world_size):
            layouts = tuple(self._layouts(rank))
            if layouts not in known:
                known[layouts] = made_of(self._plan(rank, chunk_size))
            plans.append(known[layouts])
        return plans

    def _layouts(self, rank: int) -> Iterator[Layout]:
        """What ``rank`` holds of a parameter of each kind."""
        kinds = {
            (origin.target.shape, self.placed.alike(name)): name
            for name, origin in self.origins.parameters.items()
            if isinstance(origin, Recipe)
        }
        for name in kinds.values():
            yield self.placed.layout(name, rank)

    def _plan(self, rank: int, chunk_size: int) -> Plan:
        wanted: list[tuple[Recipe, Layout, Destination]] = []

        def want(recipe: Recipe, layout: Layout, direct: bool) -> None:
            target = recipe.target
            destination = Destination(target.name, layout.numel, layout.owned, target.dtype, direct)
            wanted.append((recipe, layout, destination))

        for name, recipe in self.origins.parameters.items():
            if isinstance(recipe, Recipe):
                want(
                    recipe, self.placed.layout(name, rank), self.on_host or self.placed.homes[name] != DEVICE
                )
        for recipe in self.origins.buffers.values():
            want(recipe, replicated(recipe.target.shape), self.on_host)
        return join(self.catalog, wanted, self.tuning.options(chunk_size))


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
        if value is not None and not 0 < value < math.inf:
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
