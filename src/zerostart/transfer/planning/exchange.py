"""Who reads what for whom: the messages of a load in which ranks get bytes from each other.

Every rank makes the same list from the same tables of requests, and goes through it in its order: the server
of a step reads and sends, those it is for receive. So no message needs an announcement, and two ranks
never wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from zerostart.transfer.planning.plan import Part, Plan, Read

#: Rows ``file, offset, bytes, rows, stride``: the reads of a rank, in the order in which it makes them.
Table = npt.NDArray[np.int64]


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


@dataclass(frozen=True, slots=True)
class ExchangeStep:
    """What one rank reads once, and for whom."""

    #: The rank that reads and sends.
    server: int
    deliveries: tuple[Delivery, ...]
    #: What it reads: file, first byte, one past the last.
    extent: tuple[int, int, int]


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


def exchange_schedule(tables: Sequence[Table], limit: int, between: int = 1 << 62) -> Exchange:
    """Steps for the requests of several ranks that overlap.

    They make a region of at most twice ``limit`` bytes, which is read by the rank with the least to read
    among those that want it. The tables are sorted by file and offset, and no request spans more than
    ``limit``. The ranks agree that all is well each time that one of them has read ``between`` bytes.

    A chain of overlapping requests that no region takes (it is longer, or one rank wants more of it, the same
    bytes twice perhaps) is cut between two requests. Where these overlap, both regions read the bytes, less
    than ``limit`` of them, and ``served`` and the plan count them twice: a request comes in one message.
    """
    load, served, received = ([0] * len(tables) for _ in range(3))
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
        deliveries = tuple(Delivery(rank, *batch) for rank, batch in region.wanted.items())
        for delivery in deliveries:
            received[delivery.to] += delivery.nbytes if delivery.to != server else 0
        steps.append(ExchangeStep(server, deliveries, (region.file, region.begin, region.end)))
    return Exchange(tuple(steps), tuple(map(tuple, alone)), tuple(served), tuple(received))


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
