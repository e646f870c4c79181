"""Who reads what: own slices, each byte once and exchanged, or out of a mapping that only some ranks hold."""

from __future__ import annotations

import hashlib
import math
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from rich.filesize import decimal

from zerostart.distributed.machine import machine_name
from zerostart.distributed.network import network_rate
from zerostart.distributed.skew import Skew
from zerostart.distributed.world import World
from zerostart.errors import ConfigError, ReadError
from zerostart.transfer import MIN_CHUNK, Progress, Reader, ReadQueue, Rows, Tuning, execute
from zerostart.transfer.peer_readers import ExchangeReader, MappingReader, serve_others
from zerostart.transfer.planning import (
    Machines,
    Plan,
    Rates,
    Read,
    ReadStrategy,
    Routes,
    Tables,
    Traffic,
    choose,
    exchange_schedule,
    given_away,
    in_rounds,
    pieces_within,
    spans_within,
    table_of,
)

#: Requests in one round of an exchange, about: each rank knows those of all, some 500 bytes for each.
ROUND_REQUESTS = 1 << 16
#: Bytes that a rank reads for others between two agreements, at most (a second or so) and at least.
BETWEEN, LEAST_BETWEEN = 1 << 30, 32 << 20
#: A rank that would read on for longer than this share of the time of the one in the middle, and so many
#: seconds, when that one has ended, gives away what it has not begun.
BEHIND, BEHIND_SECONDS = 0.2, 1.0

#: How long reads that are under way are waited for where a load fails.
ENDING_SECONDS = 5.0


@dataclass(frozen=True)
class TransferStats:
    """What a transfer did on this rank."""

    #: Bytes that it read, for others too.
    read: int
    #: Bytes that it was to read.
    planned: int
    #: Bytes that others sent it.
    received: int = 0
    #: Bytes that it was to read, and that faster ranks have read in its place.
    given: int = 0
    #: For which it read, itself; 0 where nobody asked.
    seconds: float = 0.0
    #: Of all ranks; None where nobody met during the transfer.
    skew: Skew | None = None
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
    #: What its requests have in common with those of ranks that have the same.
    requests_digest: bytes = b""
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
        digest = hashlib.blake2b(table_of(plan.reads).tobytes(), digest_size=16).digest()
        return cls(
            nbytes=nbytes,
            fetched=got,
            requests=requests,
            chunk=chunk,
            rates=tuning.rates,
            machine=machine or machine_name(),
            exchange=exchange,
            requests_digest=digest,
            cached=plan.storage.cached,
        )


def agree_on_strategy(own: ReadDemand, plan: Plan, world: World) -> ReadStrategy | None:
    """Whether ranks read own slices or once for each other: the same answer on every rank; collective.

    The slowest rank's rates and rank 0's argument count. If bytes are read once, plan again with the answer's
    ``chunk_size``. None where there is nothing to choose: one rank, a mapping, no bytes that several ranks
    want. Raises ConfigError, on all ranks, if what is asked for does not fit the memory limit.
    """
    # Both are the same on all ranks: who returned here alone would leave the others in the gathering.
    if world.size == 1 or not plan.storage.worth_exchanging:
        return None
    if (rate := network_rate()) is not None:
        own = replace(own, rates=replace(own.rates, network=rate))
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
    if not strategy.once:
        return strategy
    if chunk >= MIN_CHUNK:
        # Ranks that ask for the same have one table between them.
        requests = sum({want.requests_digest: want.requests for want in wants}.values())
        return replace(strategy, rounds=max(1, -(-requests // ROUND_REQUESTS)))
    if exchange:
        raise ConfigError(
            "exchange=True needs room for ten buffers of 64 KiB on each rank; raise memory_limit or "
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
        moved = _once(plan, storages, progress, tuning, reader, world, strategy.rounds)
    else:
        tuning = tuning.suited(plan)
        gives = tuning.gives_away and not (strategy is not None and strategy.forced)
        moved = _own(plan, storages, progress, tuning, reader, world, gives)
    if moved.read != moved.planned or progress.done != plan.read_bytes:
        raise ReadError(
            f"{moved.read} bytes were read and {progress.done} delivered, but the plan has "
            f"{moved.planned} and {plan.read_bytes}; this is a bug in zerostart"
        )
    words = [tuning.describe(reader), *([str(strategy)] if strategy is not None else [])]
    if moved.given:
        words.append(f"{decimal(moved.given)} of its bytes read by faster ranks")
    return replace(moved, how="; ".join(words))


def _own(
    plan: Plan,
    storages: Sequence[torch.Tensor],
    progress: Progress,
    tuning: Tuning,
    reader: Reader,
    world: World,
    gives: bool,
) -> TransferStats:
    """Each rank its own; one that stays far behind the others gives away what it has not begun, if it may."""
    before, most = progress.done, tuning.most_threads
    # A read of a store may not come back for long: in a thread of its own it keeps no interrupt waiting.
    if not plan.storage.worth_exchanging or (world.size == 1 and not tuning.remote):
        execute(plan, storages, progress, tuning.threads, reader, tuning.depth, most_threads=most)
        return TransferStats(progress.done - before, plan.read_bytes)
    queue, begun = ReadQueue(plan), time.perf_counter()
    device = next((storage.device for storage in storages if storage.device.type != "cpu"), None)
    if device is not None:
        # What the caller's stream still does with memory that these storages now have.
        torch.accelerator.current_stream(device).synchronize()
    ended: list[float] = []
    over = threading.Event()
    inference = torch.is_inference_mode_enabled()  # modes are a thread's own, as its device is

    def work() -> None:
        try:
            if device is not None and device.index is not None:
                torch.accelerator.set_device_index(device.index)  # each thread has one of its own
            with torch.inference_mode(inference), torch.no_grad():
                execute(plan, storages, progress, tuning.threads, reader, tuning.depth, queue, most)
            ended.append(time.perf_counter() - begun)
        finally:
            over.set()

    def told() -> tuple[int, ...]:
        seconds = ended[0] if ended else time.perf_counter() - begun
        # Whether it has ended; the bytes of a chunk, if it may give some away; milliseconds; bytes that it
        # has, and wants; and how much it has not begun, computations without a byte too.
        moved, chunk = progress.done - before, plan.chunk_size if gives else 0
        return len(ended), chunk, int(1000 * seconds), moved, plan.read_bytes, len(queue)

    def heard(rows: list[list[int]]) -> None:
        if _is_behind(rows, world.rank, queue.given_bytes - (progress.done - before)):
            queue.close()

    try:
        rows = world.while_working(work, "reading", told, heard, lambda: progress.done)
    except BaseException:
        queue.close()
        # What is under way ends by itself, unless the storage does not answer.
        over.wait(ENDING_SECONDS)
        raise
    moved = TransferStats(
        progress.done - before,
        plan.read_bytes,
        seconds=ended[0],
        skew=Skew.of([row[2] for row in rows]),
    )
    # The same answer on all ranks, since all have the same rows.
    if not any(row[5] for row in rows):
        return moved
    # What was not begun another rank reads, but for reads that would give it more bytes than are wanted.
    left, computations = queue.left()
    cut = spans_within(replace(plan, reads=left), plan.chunk_size).reads
    moving = tuple(read for read in cut if _in_one_run(read, plan))
    staying = tuple(read for read in cut if not _in_one_run(read, plan))
    routes = _routes(moving, world)
    speeds = [1000 * row[3] / max(1, row[2]) for row in rows]
    steps = given_away(routes.tables, speeds, LEAST_BETWEEN)
    rest = replace(plan, reads=moving, computations=())
    sent = ExchangeReader(steps, routes, reader, world, tuning.threads)
    execute(rest, storages, progress, 1, sent, tuning.depth)
    # Collective: those that have nothing left meet the others while these end.
    kept = replace(plan, reads=staying, computations=computations)
    done = progress.done
    _own(kept, storages, progress, tuning, reader, world, gives=False)
    read = moved.read + sent.read_bytes + progress.done - done
    planned = moved.read + sent.planned_bytes + kept.read_bytes
    # All that comes from others has been given to them.
    got = sent.received_bytes
    return replace(moved, read=read, planned=planned, received=got, given=got)


def _is_behind(rows: Sequence[Sequence[int]], rank: int, begun: int) -> bool:
    """Whether ``rank`` has as much under way as it can read until the others end, and much more to begin.

    ``begun`` are bytes that it has asked for and not got; rows are as ``_own`` tells them.
    """
    # Others take chunks of this rank's size: who has less memory for its buffers has no room for them.
    chunks = {row[1] for row in rows}
    if len(chunks) > 1 or chunks == {0} or rows[rank][0]:
        return False
    # By when each rank will have read its own, at its rate so far; in milliseconds.
    ends = [row[2] if row[0] else row[2] * row[4] / row[3] if row[3] else math.inf for row in rows]
    middle = statistics.median_low(ends)
    _, _, now, done, _, left = rows[rank]
    # Before half of that time a rate says little: connections are being made.
    if not left or now < middle / 2 or ends[rank] - middle < max(BEHIND * middle, 1000 * BEHIND_SECONDS):
        return False
    return now >= middle or (done > 0 and now + begun * now / done >= middle)


def _in_one_run(read: Read, plan: Plan) -> bool:
    """Whether a rank that reads it for another gets no more bytes than the other would, nor than a chunk."""
    span = read.end - read.offset
    rows = Rows(read.rows, read.nbytes // read.rows, read.stride)
    return span <= plan.chunk_size and (read.rows == 1 or rows.fetched(plan.storage.gap) == span)


def _routes(reads: Sequence[Read], world: World) -> Routes:
    """The requests of every rank, and which machine it is on."""
    during = "planning the exchange"
    machines = Machines.of(world.all_gather_object(machine_name(), during))
    different, of_rank = world.all_gather_different(table_of(reads).tobytes(), during)
    tables = [np.frombuffer(data, np.int64).reshape(-1, 5) for data in different]
    return Routes(Tables(tables, of_rank), machines)


def _once(
    plan: Plan,
    storages: Sequence[torch.Tensor],
    progress: Progress,
    tuning: Tuning,
    reader: Reader,
    world: World,
    rounds: int,
) -> TransferStats:
    """Round by round, of files that follow each other; see ``_one_round``."""
    # Nothing longer than one buffer: a region of the exchange is at most two of these.
    plan = spans_within(plan, plan.chunk_size)
    total = TransferStats(0, 0)
    # What has no bytes that others want comes with the last.
    *first, last = in_rounds(plan.reads, plan.sizes, rounds)
    parts = [replace(plan, reads=reads, computations=()) for reads in first]
    for part in [*parts, replace(plan, reads=last)]:
        moved = _one_round(part, storages, progress, tuning, reader, world)
        total = TransferStats(
            read=total.read + moved.read,
            planned=total.planned + moved.planned,
            received=total.received + moved.received,
            given=total.given + moved.given,
            seconds=total.seconds + moved.seconds,
        )
    told = world.all_gather_numbers([int(1000 * total.seconds)], "telling how long ranks read")
    return replace(total, skew=Skew.of([of_rank for (of_rank,) in told]))


def _one_round(
    plan: Plan,
    storages: Sequence[torch.Tensor],
    progress: Progress,
    tuning: Tuning,
    reader: Reader,
    world: World,
) -> TransferStats:
    """What no other rank wants, and computations, by all threads; then the rest in the order of steps."""
    # 1. Every rank works out the same steps from all tables, so that no message needs an announcement.
    routes = _routes(plan.reads, world)
    schedule = exchange_schedule(routes.tables, plan.chunk_size, BETWEEN, LEAST_BETWEEN)
    alone = frozenset(schedule.alone[world.rank])
    # Computations make their reads in no order that ranks could agree on.
    own = replace(plan, reads=tuple(r for n, r in enumerate(plan.reads) if n in alone))
    others = tuple(r for n, r in enumerate(plan.reads) if n not in alone)
    rest = replace(plan, reads=others, computations=())
    # 2. What is this rank's alone, by all threads; no rank waits for another one meanwhile.
    moved = _own(own, storages, progress, tuning, reader, world, tuning.gives_away)
    # 3. The steps, by one thread: messages between two ranks have to be in the same order on both sides.
    sent = ExchangeReader(schedule.steps, routes, reader, world, tuning.threads)
    execute(rest, storages, progress, 1, sent, tuning.depth)
    return TransferStats(
        read=moved.read + sent.read_bytes,
        planned=moved.planned + sent.planned_bytes,
        received=moved.received + sent.received_bytes,
        given=moved.given + sent.given_bytes,
        seconds=moved.seconds + sent.measured.seconds,
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
