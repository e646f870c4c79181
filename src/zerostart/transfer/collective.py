"""Choose which rank reads which bytes, and send bytes to other ranks.

Each rank reads its own slices. Alternatively, replicas (ranks that need the same slices) each read a share
of them and exchange the shares.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from zerostart.checkpoint.storage import Rows, Storage
from zerostart.distributed.machine import machine_name
from zerostart.distributed.world import World
from zerostart.errors import ConfigError, ReadError
from zerostart.geometry.layout import Layout
from zerostart.recipe import Recipe
from zerostart.transfer.execute import Progress, execute
from zerostart.transfer.planning import Destination, Plan, Read
from zerostart.transfer.staging import HostStaging, make_staging, view_bytes
from zerostart.transfer.tuning import MIN_CHUNK, Tuning

_READING = "reading"
_EXCHANGING = "exchanging the bytes read"
#: Minimum number of bytes that one thread reads of a batch.
MIN_PART_BYTES = 1 << 20


@dataclass(frozen=True)
class TransferStats:
    """Bytes that this rank read, planned to read, and received from other ranks.

    ``how`` describes the strategy and the settings, for reports.
    """

    read: int
    planned: int
    received: int = 0
    how: str = ""


@dataclass(frozen=True)
class ReadDemand:
    """Settings of one rank, for choosing a read strategy."""

    #: The caller's argument ``exchange``; None to choose automatically.
    exchange: bool | None
    #: Maximum request size in an exchange, in bytes; 0 if the memory limit allows none.
    chunk: int
    cold: bool
    #: True if all machines read from one storage over a network.
    remote: bool
    #: True if the ranks of a machine share its page cache.
    cached: bool
    machine: str


@dataclass(frozen=True)
class ReadStrategy:
    """Choice between reading own slices and exchanging shares."""

    exchange: bool
    #: True if the caller's argument chose it.
    is_requested: bool = False
    #: Maximum size of a request in an exchange, in bytes.
    chunk_size: int = 0
    #: For each destination, the ranks that need the same slice of it.
    groups: tuple[Group, ...] | None = None
    #: Groups with their level. Groups of one level share no rank and exchange at the same time.
    levels: tuple[tuple[Group, int], ...] = ()

    def __str__(self) -> str:
        way = "each byte read once and exchanged" if self.exchange else "own slices"
        return f"{way} as requested" if self.is_requested else way


def choose_strategy(demands: Sequence[ReadDemand]) -> ReadStrategy:
    """Choose one strategy from the settings of all ranks.

    Raises ConfigError if ``exchange=True`` does not fit the memory limit.
    """
    first, chunk = demands[0], min(demand.chunk for demand in demands)
    exchange = first.exchange
    if exchange is None:
        # Ranks of one machine share its page cache, so they need no exchange unless the storage bypasses it.
        machines = len({demand.machine for demand in demands})
        shared = not first.cached or (first.remote and machines > 1)
        exchange = shared and any(demand.cold for demand in demands) and chunk >= MIN_CHUNK
    elif exchange and chunk < MIN_CHUNK:
        raise ConfigError(
            "exchange=True needs room for four buffers of 64 KiB on each rank; raise memory_limit or "
            "chunk_size, or leave exchange out"
        )
    return ReadStrategy(exchange, first.exchange is not None, chunk if exchange else 0)


def agree_on_strategy(
    shares: Sequence[tuple[Recipe, Layout, Destination]],
    storage: Storage,
    tuning: Tuning,
    exchange: bool | None,
    world: World,
) -> ReadStrategy | None:
    """Agree on a read strategy; collective. Return None if exchanges cannot help."""
    if world.size == 1 or not storage.worth_exchanging:
        return None
    chunk = tuning.exchange_chunk
    own = ReadDemand(exchange, chunk, tuning.cold, tuning.remote, storage.cached, machine_name())
    strategy = choose_strategy(world.all_gather_object(own, "agreeing on a read strategy"))
    if not strategy.exchange:
        return strategy
    keys = [_make_key(world.rank, *item) for item in shares]
    groups = find_groups(world.all_gather_object(keys, "agreeing on a read strategy"))
    levels = find_levels(groups.values())
    return replace(strategy, groups=tuple(groups[key] for key in keys), levels=tuple(sorted(levels.items())))


def _make_key(rank: int, recipe: Recipe, layout: Layout, destination: Destination) -> bytes:
    """Return a digest that is the same on ranks that need the same slice."""
    own = rank if recipe.computed or not layout.boxes else None  # computed tensors are not exchanged
    words = repr((own, destination.name, layout, destination.dtype, destination.direct))
    return hashlib.blake2b(words.encode(), digest_size=12).digest()


def execute_together(
    plan: Plan,
    storages: Sequence[torch.Tensor],
    progress: Progress,
    tuning: Tuning,
    world: World,
    strategy: ReadStrategy | None = None,
) -> TransferStats:
    """Execute a plan from storage and other ranks; collective.

    Raises PeerError if another rank dies, ReadError if the bytes read differ from the plan.
    """
    reader = tuning.reader(plan)
    fitted = tuning.fit_to_plan(plan)
    before = progress.done
    # Ranks meet while they read, so that no collective times out and failures appear early.
    meets = world.size > 1 and plan.storage.worth_exchanging

    def meet(has_ended: bool) -> bool:
        return all(world.all_gather_object(has_ended, _READING))

    execute(plan, storages, progress, fitted.threads, reader, fitted.depth, meet if meets else None)
    own = progress.done - before
    planned_bytes = plan.read_bytes - sum(r.nbytes for shared in plan.shared for r in shared.reads)
    stats = TransferStats(own, planned_bytes)
    if strategy is not None and strategy.levels:
        rounds = _ExchangeRounds(plan, storages, progress, tuning, world)
        exchanged = rounds.run(dict(strategy.levels))
        stats = TransferStats(own + exchanged.read, planned_bytes + exchanged.planned, exchanged.received)
    if stats.read != stats.planned or progress.done != plan.read_bytes:
        raise ReadError(
            f"{stats.read} bytes were read and {progress.done} delivered, but the plan has "
            f"{stats.planned} and {plan.read_bytes}; this is a bug in zerostart, please report it"
        )
    words = [fitted.describe(reader), *([str(strategy)] if strategy is not None else [])]
    return replace(stats, how="; ".join(words))


class _ExchangeRounds:
    """Exchange rounds of one load.

    In each round, every rank of a group reads a batch, and all batches pass around the ring of the group.
    """

    def __init__(
        self,
        plan: Plan,
        storages: Sequence[torch.Tensor],
        progress: Progress,
        tuning: Tuning,
        world: World,
    ) -> None:
        self._plan, self._storages, self._progress = plan, storages, progress
        self._threads, self._world = tuning.threads, world
        self._reader = tuning.reader(plan)
        self._device = next((s.device for s in storages if s.device.type != "cpu"), None)
        self._read = self._planned = self._received = 0

    def run(self, levels: dict[Group, int]) -> TransferStats:
        """Execute the rounds of all levels; collective."""
        rounds: list[list[tuple[Group, list[Batch]]]] = [[] for _ in range(max(levels.values()) + 1)]
        for shared in self._plan.shared:
            batches = make_rounds(shared.reads, self._plan.chunk_size, len(shared.ranks))
            rounds[levels[shared.ranks]] = [(shared.ranks, one_round) for one_round in batches]
        counts_by_rank = self._world.all_gather_object([len(per_level) for per_level in rounds], _EXCHANGING)
        # All ranks must run the same number of rounds, so add empty ones.
        steps: list[tuple[Group, list[Batch]]] = []
        for per_level, counts in zip(rounds, zip(*counts_by_rank, strict=True), strict=True):
            steps += per_level + [((), [])] * (max(counts) - len(per_level))
        longest = max((batch.nbytes for _, one_round in steps for batch in one_round), default=0)
        buffers = [torch.empty(longest, dtype=torch.uint8, device="cpu") for _ in range(3)]
        with (
            self._reader,
            ThreadPoolExecutor(self._threads, thread_name_prefix="zerostart-batches") as pool,
            make_staging(longest, 1, self._device) as staging,
        ):
            self._run(steps, buffers, pool, staging)
        return TransferStats(self._read, self._planned, self._received)

    def _run(
        self,
        steps: list[tuple[Group, list[Batch]]],
        buffers: list[torch.Tensor],
        pool: ThreadPoolExecutor,
        staging: HostStaging,
    ) -> None:
        filling, current, spare = buffers
        reading = self._begin_reads(steps[0], filling, pool) if steps else []
        for number, (group, one_round) in enumerate(steps):
            failure: BaseException | None = None
            with self._world.collectives(_EXCHANGING, functools.partial(_wait_for_reads, reading)):
                filling, current = current, filling
                # Read the next batch while this one is sent through the ring.
                if number + 1 < len(steps):
                    reading = self._begin_reads(steps[number + 1], filling, pool)
                for batch, room in self._pass_round(group, one_round, current, spare):
                    # Raise errors after the round, since other ranks still wait for this rank's messages.
                    try:
                        if failure is None:
                            self._deliver(batch, room, staging)
                    except BaseException as error:
                        failure = error
            if failure is not None:
                raise failure

    def _begin_reads(
        self, step: tuple[Group, list[Batch]], room: torch.Tensor, pool: ThreadPoolExecutor
    ) -> list[Future[None]]:
        group, one_round = step
        turn = group.index(self._world.rank) if one_round else 0
        if turn >= len(one_round):
            return []
        batch = one_round[turn]
        self._planned += batch.nbytes
        view, at, jobs = view_bytes(room), 0, []
        part = max(MIN_PART_BYTES, -(-batch.nbytes // self._threads))
        for read in batch.reads:
            place = view[at : at + read.nbytes]
            at += read.nbytes
            if read.rows > 1:
                rows = Rows(read.rows, read.nbytes // read.rows, read.stride)
                jobs.append(pool.submit(self._reader.gather, read.file, read.offset, rows, place, rows.width))
                continue
            for first in range(0, read.nbytes, part):
                some = [place[first : first + part]]
                jobs.append(pool.submit(self._reader.read, read.file, read.offset + first, some))
        self._read += batch.nbytes
        return jobs

    def _pass_round(
        self, group: Group, one_round: list[Batch], buffer: torch.Tensor, spare: torch.Tensor
    ) -> Iterator[tuple[Batch, torch.Tensor]]:
        if not one_round:
            return
        size, place = len(group), group.index(self._world.rank)
        receiver, sender = group[(place + 1) % size], group[place - 1]
        empty = Batch((), 0)
        order = [(place - step) % size for step in range(size)]
        ring_order = [one_round[n] if n < len(one_round) else empty for n in order]
        for batch, incoming in zip(ring_order, [*ring_order[1:], None], strict=True):
            sending = None
            if incoming is not None and batch.nbytes:
                sending = dist.isend(buffer[: batch.nbytes], receiver, group=self._world.group)
            if incoming is not None and incoming.nbytes:
                dist.recv(spare[: incoming.nbytes], sender, group=self._world.group)
                self._received += incoming.nbytes
            yield batch, buffer
            if sending is not None:
                sending.wait()
            buffer, spare = spare, buffer

    def _deliver(self, batch: Batch, room: torch.Tensor, staging: HostStaging) -> None:
        at = 0
        for read in batch.reads:
            for part in read.parts:
                staging.copy_part(part, room[at : at + read.nbytes], self._storages[part.target])
            at += read.nbytes
        self._progress.advance(batch.nbytes)


def _wait_for_reads(reading: Sequence[Future[None]]) -> None:
    # Wait for all reads before raising, since they write into the buffer.
    wait(reading)
    for one in reading:
        one.result()


Group = tuple[int, ...]


def find_groups(keys: Sequence[Iterable[Hashable]]) -> dict[Hashable, Group]:
    """Map each key to the ranks that have it, from all ranks' ``keys``."""
    ranks_by_key: dict[Hashable, list[int]] = {}
    for rank, own in enumerate(keys):
        for key in own:
            ranks_by_key.setdefault(key, []).append(rank)
    return {key: tuple(ranks) for key, ranks in ranks_by_key.items()}


def find_levels(groups: Iterable[Group]) -> dict[Group, int]:
    """Assign levels to groups; groups of one level share no rank."""
    next_level: dict[int, int] = {}
    levels = {}
    for group in sorted({group for group in groups if len(group) > 1}):
        levels[group] = max(next_level.get(rank, 0) for rank in group)
        next_level.update(dict.fromkeys(group, levels[group] + 1))
    return levels


@dataclass(frozen=True, slots=True)
class Batch:
    """Reads by one rank, whose bytes it sends to its group as one message."""

    reads: tuple[Read, ...]
    nbytes: int


def make_rounds(reads: Sequence[Read], limit: int, ranks: int) -> list[list[Batch]]:
    """Split reads into rounds of at most one batch per rank.

    A batch has at most ``limit`` bytes, unless a single read is longer.
    """
    # Use smaller batches if there is little to read, so that every rank reads a share.
    share = sum(read.nbytes for read in reads) // ranks
    limit = min(limit, share)
    split: list[Batch] = []
    batch: list[Read] = []
    total = 0
    for read in reads:
        if batch and total + read.nbytes > limit:
            split.append(Batch(tuple(batch), total))
            batch, total = [], 0
        batch.append(read)
        total += read.nbytes
    if batch:
        split.append(Batch(tuple(batch), total))
    return [split[first : first + ranks] for first in range(0, len(split), ranks)]
