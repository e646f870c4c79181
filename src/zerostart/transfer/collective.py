"""Who reads what: each rank its own slices, or replicas a share each, or the ranks that hold a mapping."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from types import TracebackType

import numpy as np
import torch
import torch.distributed as dist

from zerostart.checkpoint.storage import Reader, Rows, Storage
from zerostart.distributed.machine import machine_name
from zerostart.distributed.world import World
from zerostart.errors import ConfigError, ReadError
from zerostart.geometry.layout import Layout
from zerostart.recipe import Recipe
from zerostart.transfer.execute import Progress, execute
from zerostart.transfer.planning import Destination, Plan, Read
from zerostart.transfer.staging import HostStaging, bytes_view, make_staging
from zerostart.transfer.tuning import MIN_CHUNK, Tuning

_READING = "reading"
_EXCHANGING = "exchanging what was read"
#: Least bytes that a thread reads of a batch.
LEAST_PART = 1 << 20


@dataclass(frozen=True)
class TransferStats:
    """What a transfer did on this rank, in bytes: read and planned to be read, and received from others."""

    read: int
    planned: int
    received: int = 0
    how: str = ""


@dataclass(frozen=True)
class ReadDemand:
    """What a rank tells of itself before ranks agree who reads what."""

    #: The caller's argument; None leaves it to be chosen.
    exchange: bool | None
    #: Most bytes of a request in an exchange; 0 where the memory limit leaves no room for one.
    chunk: int
    cold: bool
    #: Whether all machines read from one storage, over a network.
    remote: bool
    #: Whether a machine's page cache serves its ranks.
    cached: bool
    machine: str

    @classmethod
    def of(cls, storage: Storage, tuning: Tuning, exchange: bool | None, machine: str) -> ReadDemand:
        """Describe a rank on this machine."""
        return cls(exchange, tuning.exchange_chunk, tuning.cold, tuning.remote, storage.cached, machine)


@dataclass(frozen=True)
class ReadStrategy:
    """Whether replicas read a share each and exchange what they have read."""

    exchange: bool
    #: Whether an argument says so.
    asked: bool = False
    #: Most bytes of a request in an exchange.
    chunk_size: int = 0
    #: For each destination the ranks that want the same of it.
    groups: tuple[Group, ...] | None = None
    #: Groups of one level have no rank in common, and exchange at the same time.
    levels: tuple[tuple[Group, int], ...] = ()

    def __str__(self) -> str:
        way = "each byte read once and exchanged" if self.exchange else "own slices"
        return f"{way} as asked" if self.asked else way


def choose_strategy(demands: Sequence[ReadDemand]) -> ReadStrategy:
    """Choose for ranks with these ``demands``: the same answer on every rank.

    Raises ConfigError for an exchange that is asked for and does not fit the memory limit.
    """
    first, chunk = demands[0], min(demand.chunk for demand in demands)
    exchange = first.exchange
    if exchange is None:
        # Ranks of one machine share its page cache: they read nothing twice. Bytes in memory cost nothing.
        machines = len({demand.machine for demand in demands})
        shared = not first.cached or (first.remote and machines > 1)
        exchange = shared and any(demand.cold for demand in demands) and chunk >= MIN_CHUNK
    elif exchange and chunk < MIN_CHUNK:
        raise ConfigError(
            "exchange=True needs room for four buffers of 64 KiB on each rank; raise memory_limit or "
            "chunk_size, or leave exchange out"
        )
    return ReadStrategy(exchange, first.exchange is not None, chunk if exchange else 0)


def is_shareable(recipe: Recipe, layout: Layout) -> bool:
    """True if replicas can share the reads of a parameter: nothing of it is calculated."""
    return not recipe.computed and bool(layout.boxes)


def agree_on_strategy(
    wanted: Sequence[tuple[Recipe, Layout, Destination]],
    storage: Storage,
    tuning: Tuning,
    exchange: bool | None,
    world: World,
) -> ReadStrategy | None:
    """Agree whether replicas read for each other; collective. None where there is nothing to choose."""
    if world.size == 1 or not storage.worth_exchanging:
        return None
    own = ReadDemand.of(storage, tuning, exchange, machine_name())
    strategy = choose_strategy(world.all_gather_object(own, "agreeing who reads what"))
    if not strategy.exchange:
        return strategy
    keys = [_key(world.rank, *item) for item in wanted]
    groups = find_groups(world.all_gather_object(keys, "agreeing who reads what"))
    levels = find_levels(groups.values())
    return replace(strategy, groups=tuple(groups[key] for key in keys), levels=tuple(sorted(levels.items())))


def _key(rank: int, recipe: Recipe, layout: Layout, destination: Destination) -> bytes:
    """Digest that ranks have in common which want the same of a destination."""
    own = None if is_shareable(recipe, layout) else rank
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
    """``transfer.execute`` wherever the bytes are; collective.

    Raises PeerError if another rank dies, ReadError for bytes that are not as planned.
    """
    reader = tuning.reader(plan)
    if len(plan.storage.readers(world.size)) < world.size:
        moved = _from_holder(plan, storages, progress, tuning, world)
    else:
        suited = tuning.suited(plan)

        before = progress.done
        # Ranks meet while they read: no collective comes to its timeout, and a failure is known soon.
        meet = None if world.size == 1 or not plan.storage.worth_exchanging else _meeting(world)
        execute(plan, storages, progress, suited.threads, reader, suited.depth, meet)
        own = progress.done - before
        planned = plan.read_bytes - sum(r.nbytes for shared in plan.shared for r in shared.reads)
        moved = TransferStats(own, planned)
        if strategy is not None and strategy.levels:
            rounds = _Rounds(plan, storages, progress, tuning, world)
            sent = rounds.run(dict(strategy.levels))
            moved = TransferStats(own + sent.read, planned + sent.planned, sent.received)
        tuning = suited
    if moved.read != moved.planned or progress.done != plan.read_bytes:
        raise ReadError(
            f"{moved.read} bytes were read and {progress.done} delivered, but the plan has "
            f"{moved.planned} and {plan.read_bytes}; this is a bug in zerostart"
        )
    words = [tuning.describe(reader), *([str(strategy)] if strategy is not None else [])]
    return replace(moved, how="; ".join(words))


def _meeting(world: World) -> Callable[[bool], bool]:
    def meet(has_ended: bool) -> bool:
        return all(world.all_gather_object(has_ended, _READING))

    return meet


class _Rounds:
    """The exchange of one load, round by round: each rank reads a batch, and its group passes it round."""

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
        """Run the rounds of all levels; collective."""
        mine = {levels[shared.ranks]: shared for shared in self._plan.shared}
        rounds: list[list[tuple[Group, list[Batch]]]] = []
        for level in range(max(levels.values()) + 1):
            shared = mine.get(level)
            batches = (
                make_rounds(shared.reads, self._plan.chunk_size, len(shared.ranks))
                if shared is not None
                else []
            )
            rounds.append([(shared.ranks, of_round) for of_round in batches] if shared is not None else [])
        told = self._world.all_gather_object([len(of_level) for of_level in rounds], _EXCHANGING)
        # Every rank takes part in the rounds of all groups, and has nothing to do in those of others.
        steps: list[tuple[Group, list[Batch]]] = []
        for of_level, counts in zip(rounds, zip(*told, strict=True), strict=True):
            steps += of_level + [((), [])] * (max(counts) - len(of_level))
        longest = max((batch.nbytes for _, of_round in steps for batch in of_round), default=0)
        rooms = [torch.empty(longest, dtype=torch.uint8, device="cpu") for _ in range(3)]
        with (
            self._reader,
            ThreadPoolExecutor(self._threads, thread_name_prefix="zerostart-batches") as pool,
            make_staging(longest, 1, self._device) as staging,
        ):
            self._run(steps, rooms, pool, staging)
        return TransferStats(self._read, self._planned, self._received)

    def _run(
        self,
        steps: list[tuple[Group, list[Batch]]],
        rooms: list[torch.Tensor],
        pool: ThreadPoolExecutor,
        staging: HostStaging,
    ) -> None:
        ahead, held, spare = rooms
        reading = self._begin(steps[0], ahead, pool) if steps else []
        for number, (group, of_round) in enumerate(steps):
            failure: BaseException | None = None
            with self._world.collectives(_EXCHANGING, functools.partial(_finish, reading)):
                ahead, held = held, ahead
                # The next batch is read while this one goes round.
                if number + 1 < len(steps):
                    reading = self._begin(steps[number + 1], ahead, pool)
                for batch, room in self._pass_round(group, of_round, held, spare):
                    # A failure here is told when the ranks meet next: they wait for messages now.
                    try:
                        if failure is None:
                            self._deliver(batch, room, staging)
                    except BaseException as error:
                        failure = error
            if failure is not None:
                raise failure

    def _begin(
        self, step: tuple[Group, list[Batch]], room: torch.Tensor, pool: ThreadPoolExecutor
    ) -> list[Future[None]]:
        batch = _own_batch(step, self._world.rank)
        if batch is None:
            return []
        self._planned += batch.nbytes
        view, at, parts = bytes_view(room), 0, []
        part = max(LEAST_PART, -(-batch.nbytes // self._threads))
        for read in batch.reads:
            place = view[at : at + read.nbytes]
            at += read.nbytes
            if read.rows > 1:
                rows = Rows(read.rows, read.nbytes // read.rows, read.stride)
                parts.append(
                    pool.submit(self._reader.gather, read.file, read.offset, rows, place, rows.width)
                )
                continue
            for first in range(0, read.nbytes, part):
                some = [place[first : first + part]]
                parts.append(pool.submit(self._reader.read, read.file, read.offset + first, some))
        self._read += batch.nbytes
        return parts

    def _pass_round(
        self, group: Group, of_round: list[Batch], held: torch.Tensor, spare: torch.Tensor
    ) -> Iterator[tuple[Batch, torch.Tensor]]:
        if not of_round:
            return
        size, place = len(group), group.index(self._world.rank)
        after, before = group[(place + 1) % size], group[place - 1]
        empty = Batch((), 0)
        order = [(place - step) % size for step in range(size)]
        in_turn = [of_round[n] if n < len(of_round) else empty for n in order]
        for batch, coming in zip(in_turn, [*in_turn[1:], None], strict=True):
            sending = None
            if coming is not None and batch.nbytes:
                sending = dist.isend(held[: batch.nbytes], after, group=self._world.group)
            if coming is not None and coming.nbytes:
                dist.recv(spare[: coming.nbytes], before, group=self._world.group)
                self._received += coming.nbytes
            yield batch, held
            if sending is not None:
                sending.wait()
            held, spare = spare, held

    def _deliver(self, batch: Batch, room: torch.Tensor, staging: HostStaging) -> None:
        at = 0
        for read in batch.reads:
            for part in read.parts:
                staging.put(part, room[at : at + read.nbytes], self._storages[part.target])
            at += read.nbytes
        self._progress.advance(batch.nbytes)


def _own_batch(step: tuple[Group, list[Batch]], rank: int) -> Batch | None:
    group, of_round = step
    place = group.index(rank) if of_round else 0
    return of_round[place] if place < len(of_round) else None


def _finish(reading: Sequence[Future[None]]) -> None:
    # All are waited for, since they write into the room; then the first failure is raised.
    wait(reading)
    for one in reading:
        one.result()


def _from_holder(
    plan: Plan, storages: Sequence[torch.Tensor], progress: Progress, tuning: Tuning, world: World
) -> TransferStats:
    holders = plan.storage.readers(world.size)
    own: Reader = tuning.reader(plan)
    wants = () if world.rank in holders else tuple(plan.all_reads())
    served = HolderReader(wants, holders[0], own, tuning.limit, world)
    if world.rank not in holders:
        execute(plan, storages, progress, 1, served, tuning.depth)
        return TransferStats(0, 0, served.received_bytes)
    with served:
        pass
    execute(plan, storages, progress, tuning.threads, own, tuning.depth)
    return TransferStats(progress.done + served.sent_bytes, plan.read_bytes + served.sent_bytes)


#: Ranks, ascending.
Group = tuple[int, ...]


def find_groups(keys: Sequence[Iterable[Hashable]]) -> dict[Hashable, Group]:
    """Find the ranks that have each key; ``keys`` has those of every rank."""
    found: dict[Hashable, list[int]] = {}
    for rank, own in enumerate(keys):
        for key in own:
            found.setdefault(key, []).append(rank)
    return {key: tuple(ranks) for key, ranks in found.items()}


def find_levels(groups: Iterable[Group]) -> dict[Group, int]:
    """Number the groups of several ranks so that those of one level have no rank in common."""
    next_level: dict[int, int] = {}
    levels = {}
    for group in sorted({group for group in groups if len(group) > 1}):
        levels[group] = max(next_level.get(rank, 0) for rank in group)
        next_level.update(dict.fromkeys(group, levels[group] + 1))
    return levels


@dataclass(frozen=True, slots=True)
class Batch:
    """Reads that one rank makes for its group, and that travel in one message of ``nbytes``."""

    reads: tuple[Read, ...]
    nbytes: int


def make_rounds(reads: Sequence[Read], limit: int, ranks: int) -> list[list[Batch]]:
    """Share ``reads`` out to ``ranks``: in each round one batch for each of them, while there are any.

    A batch has at most ``limit`` bytes, or one read.
    """
    # Small batches where there is little to read: every rank is to read its share of it.
    share = sum(read.nbytes for read in reads) // ranks
    every = [Batch(tuple(some), sum(r.nbytes for r in some)) for some in batches(reads, min(limit, share))]
    return [every[first : first + ranks] for first in range(0, len(every), ranks)]


def batches(reads: Iterable[Read], limit: int) -> Iterator[list[Read]]:
    """Consecutive reads of at most ``limit`` bytes together, or one read that is longer."""
    batch: list[Read] = []
    total = 0
    for read in reads:
        if batch and total + read.nbytes > limit:
            yield batch
            batch, total = [], 0
        batch.append(read)
        total += read.nbytes
    if batch:
        yield batch


def read_by_place(reads: Sequence[Read], limit: int, ranks: int) -> list[list[Read]]:
    """The reads that the rank at each place of a group of so many ``ranks`` makes."""
    of_place: list[list[Read]] = [[] for _ in range(ranks)]
    for batch_round in make_rounds(reads, limit, ranks):
        for place, batch in enumerate(batch_round):
            of_place[place] += batch.reads
    return of_place


_DURING = "reading from the mapping"
#: Most requests in one list; each takes 40 bytes.
MAX_REQUESTS = 1 << 14


class HolderReader(Reader):
    """Gives the bytes of this rank's ``requests``, in their order, to one thread; collective.

    A rank without requests takes part by an empty ``with``. The holder answers out of ``own``, and has
    answers of about ``limit`` bytes together in memory.
    """

    def __init__(self, requests: Sequence[Read], holder: int, own: Reader, limit: int, world: World) -> None:
        self._holder, self._own, self._world = holder, own, world
        longest = max((read.nbytes for read in requests), default=0)
        longest = max(world.all_gather_object(longest, _DURING))
        found = [
            some[first : first + MAX_REQUESTS]
            for some in batches(requests, longest)
            for first in range(0, len(some), MAX_REQUESTS)
        ]
        counts = world.all_gather_object(len(found), _DURING)
        served = [rank for rank, count in enumerate(counts) if count]
        # So many ranks in a round as the holder has room for: it has each answer twice while it sends.
        width = max(1, limit // (2 * max(1, longest)))
        self._turns = [
            served[first : first + width]
            for first in range(0, len(served), width)
            for _ in range(max(counts[rank] for rank in served[first : first + width]))
        ]
        self._lists = iter(found)
        self._left = memoryview(b"")
        self.received_bytes = 0
        self.sent_bytes = 0

    def __enter__(self) -> HolderReader:
        self._own.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # Others may want more. A rank that has failed tells it at the end of its phase.
            while error is None and self._turns:
                self._run_round()
        finally:
            self._own.__exit__(kind, error, trace)

    def read(self, file: int, offset: int, buffers: Sequence[memoryview]) -> None:
        self._wait()
        for buffer in buffers:
            buffer[:] = self._left[: len(buffer)]
            self._left = self._left[len(buffer) :]

    def gather(self, file: int, offset: int, rows: Rows, target: memoryview, step: int) -> None:
        self._wait()
        nbytes = rows.count * rows.width
        source = torch.frombuffer(self._left, dtype=torch.uint8)[:nbytes].view(rows.count, rows.width)
        placed = torch.frombuffer(target, dtype=torch.uint8)
        placed.as_strided((rows.count, rows.width), (step, 1)).copy_(source)
        self._left = self._left[nbytes:]

    def announce(self, file: int, offset: int, rows: Rows) -> None:
        """Do nothing: the lists say what is read."""

    def _wait(self) -> None:
        while not self._left:
            self._run_round()

    def _run_round(self) -> None:
        ranks = self._turns.pop(0)
        size, rank = self._world.size, self._world.rank
        mine = next(self._lists, []) if rank in ranks else []
        rows = [(read.file, read.offset, read.nbytes, read.rows, read.stride) for read in mine]
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        asks = [nothing] * size
        asks[self._holder] = torch.from_numpy(np.array(rows, np.int64).reshape(-1).view(np.uint8))
        asked = self._world.exchange(asks, _DURING)
        answers = [nothing] * size
        if rank == self._holder:
            answers = [self._answer(table) for table in asked]
        got = self._world.exchange(answers, _DURING)[self._holder]
        self.received_bytes += got.numel()
        self._left = bytes_view(got)

    def _answer(self, asked: torch.Tensor) -> torch.Tensor:
        table = asked.numpy().view(np.int64).reshape(-1, 5)
        answer = torch.empty(int(table[:, 2].sum()), dtype=torch.uint8, device="cpu")
        view, at = bytes_view(answer), 0
        for file, offset, nbytes, count, stride in table.tolist():
            place = view[at : at + nbytes]
            at += nbytes
            if count == 1:
                self._own.read(file, offset, [place])
            else:
                width = nbytes // count
                self._own.gather(file, offset, Rows(count, width, stride), place, width)
        self.sent_bytes += answer.numel()
        return answer
