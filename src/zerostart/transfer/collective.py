"""Who reads what: own slices, each byte once and exchanged, or out of a mapping that only some ranks hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from zerostart.distributed.machine import machine_name
from zerostart.distributed.world import World
from zerostart.errors import ConfigError, ReadError
from zerostart.transfer import MIN_CHUNK, Progress, Reader, Rows, Tuning, execute
from zerostart.transfer.peer_readers import ExchangeReader, MappingReader, serve_others
from zerostart.transfer.planning import (
    Plan,
    Rates,
    ReadStrategy,
    Traffic,
    choose,
    exchange_schedule,
    pieces_within,
    spans_within,
    table_of,
)

#: Most requests of all ranks together whose steps every rank works out: beyond, each reads its own.
MOST_REQUESTS = 1 << 18
#: Bytes that a rank reads for others between two agreements: a second or so.
BETWEEN = 1 << 30


@dataclass(frozen=True)
class TransferStats:
    """What a transfer did on this rank."""

    #: Bytes that it read, for others too.
    read: int
    #: Bytes that it was to read.
    planned: int
    #: Bytes that others sent it.
    received: int = 0
    #: In words, what it did.
    how: str = ""


@dataclass(frozen=True)
class ReadDemand:
    """What a rank tells of itself before anything is read."""

    #: Bytes that it wants.
    nbytes: int
    #: Bytes that storage gives for them with own slices: whole rows for narrow columns.
    fetched: int
    #: Requests that an exchange would have of it.
    requests: int
    #: Most bytes of a request in an exchange; 0 where its memory limit leaves no room for one.
    chunk: int
    rates: Rates
    #: Name of its machine: ranks of one share a page cache.
    machine: str
    #: The caller's argument; None leaves it to be chosen.
    exchange: bool | None
    #: Whether a machine's page cache serves its ranks.
    cached: bool = True

    @classmethod
    def of(cls, plan: Plan, tuning: Tuning, exchange: bool | None, machine: str | None = None) -> ReadDemand:
        """What a rank with this plan for own slices tells; ``machine`` is this one unless it is named."""
        chunk = tuning.exchange_chunk
        nbytes = got = requests = 0
        for read in plan.reads:
            nbytes += read.nbytes
            if read.rows == 1:
                got += read.nbytes
                requests += 1
            else:
                got += Rows(read.rows, read.nbytes // read.rows, read.stride).fetched(plan.storage.gap)
                requests += pieces_within(read, chunk or read.nbytes)
        where = machine or machine_name()
        return cls(nbytes, got, requests, chunk, tuning.rates, where, exchange, plan.storage.cached)


def agree_on_strategy(own: ReadDemand, plan: Plan, world: World) -> ReadStrategy | None:
    """Whether ranks read own slices or once for each other: the same answer on every rank; collective.

    The slowest rank's rates and rank 0's argument count. If bytes are read once, plan again with the answer's
    ``chunk_size``. None where there is nothing to choose: one rank, a mapping, no bytes that several ranks
    want. Raises ConfigError, on all ranks, if what is asked for does not fit the memory limit.
    """
    # Both are the same on all ranks: who returned here alone would leave the others in the gathering.
    if world.size == 1 or not plan.storage.worth_exchanging:
        return None
    return chosen(world.all_gather_object(own, "agreeing who reads what"), sum(plan.sizes))


def chosen(wants: Sequence[ReadDemand], stored: int) -> ReadStrategy | None:
    """The choice for ranks with these ``wants`` of files of ``stored`` bytes; see ``agree_on_strategy``.

    Raises ConfigError for an exchange that is asked for and cannot be.
    """
    # Rank 0's argument and the smallest buffer, so that all ranks come to one answer.
    exchange, chunk = wants[0].exchange, min(want.chunk for want in wants)
    wanted, got = sum(want.nbytes for want in wants), sum(want.fetched for want in wants)
    traffic = Traffic(
        wanted=wanted,
        differ=min(wanted, stored),
        most=max(want.nbytes for want in wants),
        ranks=len(wants),
        machines=len({want.machine for want in wants}),
        chunk=chunk,
        fetched=got,
        cached=wants[0].cached,
    )
    # No byte is wanted twice: to exchange would only add messages.
    if exchange is None and got <= traffic.differ:
        return None
    strategy = choose(traffic, Rates.slowest([want.rates for want in wants]), exchange)
    requests = sum(want.requests for want in wants)
    if not strategy.once or (chunk >= MIN_CHUNK and requests <= MOST_REQUESTS):
        return strategy
    if exchange:
        raise ConfigError(
            "exchange=True needs room for eight buffers of 64 KiB on each rank, and at most "
            f"{MOST_REQUESTS} requests of all ranks (here {requests}); raise memory_limit or "
            "chunk_size, or leave exchange out"
        )
    return replace(strategy, once=False, chunk_size=0)


def execute_together(
    plan: Plan,
    storages: Sequence[torch.Tensor],
    progress: Progress,
    tuning: Tuning,
    world: World,
    strategy: ReadStrategy | None = None,
) -> TransferStats:
    """``transfer.execute`` wherever the bytes are; collective.

    Where ``strategy`` says so, bytes that several ranks want are read by one of them and sent to the others.
    Raises PeerError if a rank that serves or is served dies, ReadError for bytes that are not as planned.
    """
    reader = tuning.reader(plan)
    if len(plan.storage.readers(world.size)) < world.size:
        moved = _from_holder(plan, storages, progress, tuning, world)
    elif strategy is not None and strategy.once:
        tuning = tuning.exchanging(plan.chunk_size)
        reader = tuning.reader(plan)
        moved = _once(plan, storages, progress, tuning, reader, world)
    else:
        execute(plan, storages, progress, tuning.threads, reader, tuning.depth)
        moved = TransferStats(progress.done, plan.read_bytes)
    if moved.read != moved.planned or progress.done != plan.read_bytes:
        raise ReadError(
            f"{moved.read} bytes were read and {progress.done} delivered, but the plan has "
            f"{moved.planned} and {plan.read_bytes}; this is a bug in zerostart"
        )
    how = tuning.describe(reader)
    return replace(moved, how=f"{how}; {strategy}" if strategy is not None else how)


def _once(
    plan: Plan,
    storages: Sequence[torch.Tensor],
    progress: Progress,
    tuning: Tuning,
    reader: Reader,
    world: World,
) -> TransferStats:
    """What no other rank wants, and computations, by all threads; then the rest in the order of steps."""
    # 1. Nothing longer than one buffer: a region of the exchange is at most two of these.
    plan = spans_within(plan, plan.chunk_size)
    table = table_of(plan.reads)
    tables = world.all_gather_object(table, "planning the exchange")
    # 2. Every rank works out the same steps from all tables, so that no message needs an announcement.
    schedule = exchange_schedule(tables, plan.chunk_size, BETWEEN)
    alone = frozenset(schedule.alone[world.rank])
    # Computations make their reads in no order that ranks could agree on.
    own = replace(plan, reads=tuple(r for n, r in enumerate(plan.reads) if n in alone))
    others = tuple(r for n, r in enumerate(plan.reads) if n not in alone)
    rest = replace(plan, reads=others, computations=())
    # 3. What is this rank's alone, by all threads; no rank waits for another one meanwhile.
    execute(own, storages, progress, tuning.threads, reader, tuning.depth)
    read = progress.done
    # 4. The steps, by one thread: messages between two ranks have to be in the same order on both sides.
    reader = ExchangeReader(schedule.steps, tables, reader, world, tuning.threads)
    execute(rest, storages, progress, 1, reader, tuning.depth)
    return TransferStats(
        read=read + reader.read_bytes,
        planned=own.read_bytes + schedule.served[world.rank],
        received=reader.received_bytes,
    )


def _from_holder(
    plan: Plan, storages: Sequence[torch.Tensor], progress: Progress, tuning: Tuning, world: World
) -> TransferStats:
    """Read from a mapping that some ranks hold, the first of which serves those that do not."""
    holders = plan.storage.readers(world.size)
    holds = world.rank in holders
    table = table_of(() if holds else tuple(plan.all_reads()))
    # A message takes at least one request whole, so the longest request of any rank sets the room of all.
    longest = max(plan.chunk_size, int(table[:, 2].max(initial=0)))
    told = world.all_gather_object((len(table), longest), "agreeing who reads what")
    served = [rank for rank, (requests, _) in enumerate(told) if requests]
    # Of one size on all ranks: how requests are grouped into messages depends on it, on either side.
    room = torch.empty(max(nbytes for _, nbytes in told), dtype=torch.uint8, device="cpu")
    if not holds:
        reader = MappingReader(table, holders[0], len(served), room, world)
        execute(plan, storages, progress, 1, reader, tuning.depth)
        return TransferStats(0, 0, reader.received_bytes)
    # Those that hold it too, and serve nobody, begin with the others as well.
    mine = served if world.rank == holders[0] else []
    sent = serve_others(mine, tuning.reader(plan), room, world)
    execute(plan, storages, progress, tuning.threads, tuning.reader(plan), tuning.depth)
    return TransferStats(progress.done + sent, plan.read_bytes + sent)
