"""Who reads what for whom: the messages of a load in which ranks get bytes from each other.

Every rank makes the same list from the same tables of requests, and goes through it in its order: the server
of a step reads and sends, those it is for receive. So no message needs an announcement, and two ranks
never wait for each other.

Between machines a byte goes once: where several ranks of another machine want more than the extent has bytes,
the server sends the extent to one of them, which passes on to the others what they want of it.

A server that turns out to be slow gives its next extents away (``reassigned``): the order of the list stays,
and who reads is worked out by all ranks alike from what they have told each other.
"""

from __future__ import annotations

import heapq
import statistics
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from zerostart.transfer.planning.plan import Part, Plan, Read

#: Rows ``file, offset, bytes, rows, stride``: the reads of a rank, in the order in which it makes them.
Table = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Machines:
    """Which rank is on which machine."""

    #: The machine of each rank, whatever tells it from others.
    names: tuple[Hashable, ...]
    #: The place of each rank among those of its machine.
    places: tuple[int, ...]

    @classmethod
    def of(cls, names: Sequence[Hashable]) -> Machines:
        """The machines of these names, one for each rank."""
        count: Counter[Hashable] = Counter()
        places = []
        for name in names:
            places.append(count[name])
            count[name] += 1
        return cls(tuple(names), tuple(places))

    @property
    def relayed(self) -> bool:
        """Whether there are several, and several ranks on one."""
        return 1 < len(set(self.names)) < len(self.names)


@dataclass(frozen=True, slots=True)
class Delivery:
    """Consecutive requests of one rank, in one message."""

    #: The rank that asked.
    to: int
    #: Number of the first request.
    first: int
    #: One past that of the last.
    stop: int
    #: Bytes of the message.
    nbytes: int
    #: The rank that sends it, which has the extent: the server or one of the relays.
    sender: int = -1


@dataclass(frozen=True, slots=True)
class ExchangeStep:
    """What one rank reads once, and for whom."""

    #: The rank that reads and sends.
    server: int
    deliveries: tuple[Delivery, ...]
    #: What it reads: file, first byte, one past the last.
    extent: tuple[int, int, int]
    #: Ranks of other machines that get all of it, and send their machine's ranks what they want of it.
    relays: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the extent."""
        return self.extent[2] - self.extent[1]

    def messages(self) -> Iterator[tuple[int, int, int]]:
        """Those between two ranks: sender, receiver, bytes."""
        for relay in self.relays:
            yield self.server, relay, self.nbytes
        for delivery in self.deliveries:
            if delivery.to != delivery.sender:
                yield delivery.sender, delivery.to, delivery.nbytes


#: Least bytes that a thread reads of an extent.
LEAST_PART = 1 << 20


def part_of(nbytes: int, threads: int) -> int:
    """Bytes that each of ``threads`` reads of an extent of ``nbytes``, but for the last: one request each."""
    return max(LEAST_PART, -(-nbytes // threads))


class Agreement:
    """Where all ranks tell each other whether they have met an error, so that none goes on for long."""


def table_of(reads: Sequence[Read]) -> Table:
    """The table of a rank's requests."""
    rows = [(r.file, r.offset, r.nbytes, r.rows, r.stride) for r in reads]
    return np.array(rows, np.int64).reshape(-1, 5)


def batches(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, int, int]]:
    """Consecutive requests of these ``sizes`` that go in one message: first, one past the last, bytes.

    A message takes one request, or several of ``limit`` bytes at most.
    """
    first = total = 0
    for number, size in enumerate(sizes):
        # ``number > first``: a request longer than the limit goes in a message by itself.
        if number > first and total + size > limit:
            yield first, number, total
            first, total = number, 0
        total += size
    if len(sizes) > first:
        yield first, len(sizes), total


@dataclass(frozen=True, slots=True)
class Exchange:
    """Bytes that several ranks want, each read once, but at a cut (see ``exchange_schedule``)."""

    steps: tuple[ExchangeStep | Agreement, ...]
    #: For each rank the numbers of the requests that nobody else's overlap, which it reads for itself.
    alone: tuple[tuple[int, ...], ...]
    #: For each rank the bytes that it reads by steps, for itself and others.
    served: tuple[int, ...]
    #: For each rank the bytes that others send it by them.
    received: tuple[int, ...]


#: How often ranks agree in an exchange: one that has become slow is waited for between two times.
AGREEMENTS = 24


def exchange_schedule(
    tables: Sequence[Table],
    limit: int,
    between: int = 1 << 62,
    machines: Machines | None = None,
    least: int | None = None,
) -> Exchange:
    """Steps for the requests of several ranks that overlap, who are all on one of ``machines`` by default.

    They make a region of at most twice ``limit`` bytes, which is read by the rank with the least to read
    among those that want it. The tables are sorted by file and offset, and no request spans more than
    ``limit``. The ranks agree that all is well each time that one of them has read ``between`` bytes; with
    ``least`` after fewer, but for so many at least, such that they do so ``AGREEMENTS`` times.

    A chain of overlapping requests that no region takes (it is longer, or one rank wants more of it, the same
    bytes twice perhaps) is cut between two requests. Where these overlap, both regions read the bytes, less
    than ``limit`` of them, and ``served`` and the plan count them twice: a request comes in one message.
    """
    load, served, received = ([0] * len(tables) for _ in range(3))
    machines = machines or Machines.of([0] * len(tables))
    alone: list[list[int]] = [[] for _ in tables]
    regions = []
    for region in _regions(tables, limit):
        # One rank's region is read by it alone, in no step; its bytes count as its load when servers are
        # chosen.
        if len(region.wanted) > 1:
            regions.append(region)
            continue
        ((rank, (first, stop, nbytes)),) = region.wanted.items()
        alone[rank] += range(first, stop)
        load[rank] += nbytes
    steps: list[ExchangeStep | Agreement] = []
    if least is not None:
        share = sum(region.end - region.begin for region in regions) // (AGREEMENTS * len(tables))
        between = min(between, max(least, share))
    agreed = 0
    # In the order of the files, by every rank alike: ties of `min` go to the lowest rank.
    for region in regions:
        server = min(region.wanted, key=lambda rank: load[rank])
        # Measured by the busiest server: the others have read less since then.
        if served[server] - agreed >= between:
            agreed = max(served)
            steps.append(Agreement())
        # Deterministic sums of integers: every rank comes to the same loads, and so to the same servers.
        load[server] += region.end - region.begin
        served[server] += region.end - region.begin
        deliveries = [Delivery(rank, *batch) for rank, batch in region.wanted.items()]
        step = step_of(server, deliveries, (region.file, region.begin, region.end), machines)
        for _, to, nbytes in step.messages():
            received[to] += nbytes
        steps.append(step)
    return Exchange(tuple(steps), tuple(map(tuple, alone)), tuple(served), tuple(received))


def step_of(
    server: int,
    deliveries: Sequence[Delivery],
    extent: tuple[int, int, int],
    machines: Machines,
) -> ExchangeStep:
    """The step in which ``server`` reads ``extent``, with who sends what to whom."""
    nbytes = extent[2] - extent[1]
    of_machine: dict[Hashable, list[Delivery]] = {}
    for delivery in deliveries:
        of_machine.setdefault(machines.names[delivery.to], []).append(delivery)
    relays: list[int] = []
    sent: list[Delivery] = []
    names, place = machines.names, machines.places[server]
    for machine, wanted in of_machine.items():
        sender = server
        # Different columns of the same rows are no more bytes apart than together: then each gets its own.
        if machine != names[server] and sum(delivery.nbytes for delivery in wanted) > nbytes:
            # The one in the server's own place: so a rank has to do with one rank of each other machine.
            sender = wanted[place % len(wanted)].to
            relays.append(sender)
        sent += [replace(delivery, sender=sender) for delivery in wanted]
    return ExchangeStep(server, tuple(sent), extent, tuple(relays))


#: A rank that reads this many times slower than the one in the middle is slow.
SLOW = 2.0


def reassigned(
    steps: Sequence[ExchangeStep | Agreement], speeds: Sequence[float], machines: Machines
) -> list[ExchangeStep | Agreement]:
    """The same steps in the same order, read by ranks in proportion to their ``speeds``, in bytes a second.

    0 stands for a rank that has read nothing, and is taken to be like the one in the middle. The first step
    of each server stays with it: it is being read. A step is read by a rank that wants some of it, but by
    any where all of these are slow.
    """
    known = [speed for speed in speeds if speed > 0]
    if not known:
        return list(steps)
    middle = statistics.median(known)
    rates = [speed if speed > 0 else middle for speed in speeds]
    fast = [rank for rank, rate in enumerate(rates) if rate * SLOW >= middle]
    seconds = [0.0] * len(rates)
    begun: set[int] = set()
    made: list[ExchangeStep | Agreement] = []
    for step in steps:
        if isinstance(step, Agreement):
            made.append(step)
            continue
        server = step.server
        if server in begun:
            wanting = [delivery.to for delivery in step.deliveries]
            able = wanting if any(rates[rank] * SLOW >= middle for rank in wanting) else [*wanting, *fast]
            server = min(able, key=lambda rank: (seconds[rank] + step.nbytes / rates[rank], rank))
        begun.add(step.server)
        seconds[server] += step.nbytes / rates[server]
        made.append(
            step if server == step.server else step_of(server, step.deliveries, step.extent, machines)
        )
    return made


def slow_ranks(speeds: Sequence[float]) -> set[int]:
    """The ranks that read much slower than the one in the middle; 0 tells nothing of a rank."""
    known = [speed for speed in speeds if speed > 0]
    middle = statistics.median(known) if known else 0.0
    return {rank for rank, speed in enumerate(speeds) if 0 < speed * SLOW < middle}


def given_away(
    tables: Sequence[Table],
    speeds: Sequence[float],
    machines: Machines,
    between: int = 1 << 62,
) -> list[ExchangeStep | Agreement]:
    """Steps for requests that their ranks have not come to, each read by any rank.

    Ranks read in proportion to their ``speeds``, in bytes a second. A step has one request, whose rows, if it
    has several, lie so close that all between them is read.
    """
    known = [speed for speed in speeds if speed > 0]
    middle = statistics.median(known) if known else 1.0
    rates = [speed if speed > 0 else middle for speed in speeds]
    longest = max((int(table[:, 2].max()) for table in tables if len(table)), default=0)
    # By when a rank would have read one more; a heap, for there may be thousands of ranks.
    turns = [(longest / rate, rank) for rank, rate in enumerate(rates)]
    heapq.heapify(turns)
    queues = [list(enumerate(table.tolist())) for table in tables]
    steps: list[ExchangeStep | Agreement] = []
    passed = 0
    # In turns, so that all that have given something away get some of it at a time.
    for turn in range(max(map(len, queues), default=0)):
        for rank, queue in enumerate(queues):
            if turn >= len(queue):
                continue
            number, (file, offset, nbytes, rows, stride) = queue[turn]
            extent = file, offset, offset + (rows - 1) * stride + nbytes // rows
            seconds, server = turns[0]
            heapq.heapreplace(turns, (seconds + (extent[2] - offset) / rates[server], server))
            if passed >= between:
                steps.append(Agreement())
                passed = 0
            passed += extent[2] - offset
            steps.append(step_of(server, [Delivery(rank, number, number + 1, nbytes)], extent, machines))
    return steps


class _Region:
    """Requests that overlap or, of ranks that are in it already, follow closely."""

    def __init__(self, file: int, begin: int) -> None:
        self.file, self.begin, self.end = file, begin, begin
        self.wanted: dict[int, tuple[int, int, int]] = {}  # by rank: first request, one past the last, bytes

    def takes(self, file: int, begin: int, end: int, rank: int, nbytes: int, limit: int) -> bool:
        # Both the message to a rank and the extent that its server reads have to fit buffers of twice the
        # limit.
        message = nbytes + (self.wanted[rank][2] if rank in self.wanted else 0)
        if file != self.file or max(message, max(end, self.end) - self.begin) > 2 * limit:
            return False
        if begin < self.end:
            return True
        # What only touches is joined for a rank that is in the region already, for longer reads and fewer
        # messages; another rank's would be sent by a server without need.
        return begin == self.end and rank in self.wanted and end - self.begin <= limit

    def add(self, end: int, rank: int, number: int, nbytes: int) -> None:
        first, _, total = self.wanted.get(rank, (number, number, 0))
        self.wanted[rank] = (first, number + 1, total + nbytes)
        self.end = max(self.end, end)


def _regions(tables: Sequence[Table], limit: int) -> Iterator[_Region]:
    region: _Region | None = None
    for file, begin, end, rank, number, nbytes in _sorted(tables):
        if region is None or not region.takes(file, begin, end, rank, nbytes, limit):
            if region is not None:
                yield region
            region = _Region(file, begin)
        region.add(end, rank, number, nbytes)
    if region is not None:
        yield region


def _sorted(tables: Sequence[Table]) -> Iterator[list[int]]:
    """All requests by place: file, first byte, one past the last, rank, number, bytes."""
    columns = []
    for rank, table in enumerate(tables):
        file, offset, nbytes, rows, stride = table.T
        # A request of several rows spans the gaps between them too, which its server reads along.
        end = offset + (rows - 1) * stride + nbytes // np.maximum(rows, 1)
        columns.append(
            np.stack([file, offset, end, np.full(len(table), rank), np.arange(len(table)), nbytes])
        )
    every = np.concatenate(columns, axis=1) if columns else np.empty((6, 0), np.int64)
    # The last key is the first to be sorted by: file, first byte, then rank and number, so that ties fall
    # alike on every rank.
    order = np.lexsort((every[4], every[3], every[1], every[0]))
    # As Python integers, but not all at once: they take ten times the room.
    for start in range(0, len(order), 1 << 14):
        yield from every[:, order[start : start + (1 << 14)]].T.tolist()


def spans_within(plan: Plan, limit: int) -> Plan:
    """The plan with reads of several rows cut until none spans more than ``limit`` bytes (or one row)."""
    reads = [part for read in plan.reads for part in _cut(read, limit)]
    return replace(plan, reads=tuple(sorted(reads, key=lambda read: (read.file, read.offset))))


def pieces_within(read: Read, limit: int) -> int:
    """How many reads ``spans_within`` makes of this one."""
    return -(-read.rows // _rows_within(read, limit))


def _rows_within(read: Read, limit: int) -> int:
    if read.rows == 1:
        return 1
    return max(1, (limit - read.nbytes // read.rows) // read.stride + 1)


def _cut(read: Read, limit: int) -> Iterator[Read]:
    if read.rows == 1:
        yield read
        return
    width, most = read.nbytes // read.rows, _rows_within(read, limit)
    (part,) = read.parts
    (_, span, step), *inner = part.loops
    for first in range(0, read.rows, most):
        count = min(most, read.rows - first)
        loops = ((count, span, step), *inner) if count > 1 else tuple(inner)
        cut = Part(0, part.dtype, part.target, part.to + first * step, loops, part.direct)
        offset = read.offset + first * read.stride
        yield Read(
            read.file, offset, count * width, (cut,), read.direct, count, read.stride if count > 1 else 0
        )
