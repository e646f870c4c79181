"""Who reads what for whom: the messages of a load in which ranks get bytes from each other.

Every rank makes the same list from the same tables of requests, and goes through it in its order: the server
of a step reads and sends, those it is for receive. So no message needs an announcement, and two ranks
never wait for each other.

The list is as long as the checkpoint, whatever the number of ranks: replicas have one table between them
(``Tables``), a step names tables, and who sends what to whom is worked out when it is run (``Routes``).

Between machines a byte goes once: where several ranks of another machine want more than the extent has bytes,
the server sends the extent to one of them, which passes on to the others what they want of it.

A server that turns out to be slow gives its next extents away (``reassigned``): the order of the list stays,
and who reads is worked out by all ranks alike from what they have told each other.
"""

from __future__ import annotations

import heapq
import statistics
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
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


class Tables:
    """The requests of every rank: ranks that ask for the same share one table.

    ``different`` are the tables, and ``of_rank`` has the number of the one of each rank.
    """

    def __init__(self, different: Sequence[Table], of_rank: Sequence[int]) -> None:
        self.different = tuple(different)
        self.of_rank = tuple(of_rank)
        holders: list[list[int]] = [[] for _ in self.different]
        for rank, number in enumerate(self.of_rank):
            holders[number].append(rank)
        #: The ranks of each table, ascending.
        self.holders = tuple(map(tuple, holders))

    @classmethod
    def of(cls, tables: Sequence[Table]) -> Tables:
        """Those of ranks with these ``tables``, one for each rank."""
        numbers: dict[bytes, int] = {}
        different = []
        of_rank = []
        for table in tables:
            data = table.tobytes()
            if data not in numbers:
                numbers[data] = len(numbers)
                different.append(table)
            of_rank.append(numbers[data])
        return cls(different, of_rank)


@dataclass(frozen=True, slots=True)
class Want:
    """Consecutive requests of a table, which each of its ranks gets in one message."""

    #: Number of the table.
    table: int
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
    wants: tuple[Want, ...]
    #: What it reads: file, first byte, one past the last.
    extent: tuple[int, int, int]

    @property
    def nbytes(self) -> int:
        """Bytes of the extent."""
        return self.extent[2] - self.extent[1]


class Routes:
    """Who sends what of a step to whom."""

    def __init__(self, tables: Tables, machines: Machines) -> None:
        self.tables, self.machines = tables, machines
        #: By machine and number of a table, the ranks there that have it.
        self._ranks: dict[Hashable, dict[int, list[int]]] = {}
        for rank, (name, number) in enumerate(zip(machines.names, tables.of_rank, strict=True)):
            self._ranks.setdefault(name, {}).setdefault(number, []).append(rank)
        #: How many these are. Machines with as many of each are alike: a step has one way with all of them.
        self._counts = {
            name: {n: len(ranks) for n, ranks in here.items()} for name, here in self._ranks.items()
        }
        kinds: dict[tuple[tuple[int, int], ...], list[Hashable]] = {}
        for name, counts in self._counts.items():
            kinds.setdefault(tuple(sorted(counts.items())), []).append(name)
        self._alike = list(kinds.values())
        #: By number of a table, the kinds of machines with a rank that has it.
        self._with: list[list[int]] = [[] for _ in tables.different]
        for kind, counts_of_kind in enumerate(kinds):
            for number, _ in counts_of_kind:
                self._with[number].append(kind)

    def here(self, want: Want, machine: Hashable) -> Sequence[int]:
        """The ranks of ``machine`` that want it."""
        return self._ranks[machine].get(want.table, ())

    def sender(self, step: ExchangeStep, machine: Hashable) -> int:
        """The rank that sends what is wanted on ``machine``: the server, or one there that gets it all."""
        names, places = self.machines.names, self.machines.places
        if machine == names[step.server]:
            return step.server
        if not self._is_relayed(step, machine):
            return step.server
        wanting = sorted(rank for want in step.wants for rank in self.here(want, machine))
        # The one in the server's own place: so a rank has to do with one rank of each other machine.
        return wanting[places[step.server] % len(wanting)]

    def relays(self, step: ExchangeStep) -> list[int]:
        """Ranks of other machines that get all of it, and send their machine's ranks what they want of it."""
        senders = (self.sender(step, machine) for machine in self._relayed(step))
        return [rank for rank in senders if rank != step.server]

    def receivers(self, step: ExchangeStep, sender: int) -> list[tuple[Want, list[int]]]:
        """To whom ``sender``, the server or a relay, sends what, itself included."""
        own = self.machines.names[sender]
        if sender != step.server:
            return [(want, list(self.here(want, own))) for want in step.wants]
        relayed = {machine for machine in self._relayed(step) if machine != own}
        names, holders = self.machines.names, self.tables.holders
        return [
            (want, [rank for rank in holders[want.table] if names[rank] not in relayed])
            for want in step.wants
        ]

    def messages(self, steps: Iterable[ExchangeStep | Agreement]) -> dict[tuple[int, int], int]:
        """The bytes that ranks send each other in all of them, by sender and receiver."""
        # Of steps of one server for the same tables, by the same ways, the bytes are added up before the
        # ranks are gone through: there are far more steps than ranks.
        sums: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[ExchangeStep, list[int]]] = {}
        for step in steps:
            if isinstance(step, Agreement):
                continue
            key = step.server, tuple(want.table for want in step.wants), tuple(self._relayed_kinds(step))
            total = sums.setdefault(key, (step, [0] * (1 + len(step.wants))))[1]
            for place, nbytes in enumerate([step.nbytes, *(want.nbytes for want in step.wants)]):
                total[place] += nbytes
        found: Counter[tuple[int, int]] = Counter()
        for step, (whole, *parts) in sums.values():
            relays = self.relays(step)
            for relay in relays:
                found[step.server, relay] += whole
            for sender in (step.server, *relays):
                for (_, ranks), nbytes in zip(self.receivers(step, sender), parts, strict=True):
                    for rank in ranks:
                        if rank != sender:
                            found[sender, rank] += nbytes
        return dict(found)

    def _relayed(self, step: ExchangeStep) -> list[Hashable]:
        """Machines that get it once, perhaps the server's own."""
        return [name for kind in self._relayed_kinds(step) for name in self._alike[kind]]

    def _relayed_kinds(self, step: ExchangeStep) -> list[int]:
        kinds = sorted({kind for want in step.wants for kind in self._with[want.table]})
        return [kind for kind in kinds if self._is_relayed(step, self._alike[kind][0])]

    def _is_relayed(self, step: ExchangeStep, machine: Hashable) -> bool:
        """Whether a machine gets it once, and not a message for each of its ranks: they want more bytes."""
        # Different columns of the same rows are no more bytes apart than together: then each gets its own.
        counts = self._counts[machine]
        return sum(want.nbytes * counts.get(want.table, 0) for want in step.wants) > step.nbytes


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


#: How often ranks agree in an exchange: one that has become slow is waited for between two times.
AGREEMENTS = 24


def exchange_schedule(
    tables: Tables, limit: int, between: int = 1 << 62, least: int | None = None
) -> Exchange:
    """Steps for the requests of several ranks that overlap.

    They make a region of at most twice ``limit`` bytes, which is read by the rank with the least to read
    among those that want it. The tables are sorted by file and offset, and no request spans more than
    ``limit``. The ranks agree that all is well each time that one of them has read ``between`` bytes; with
    ``least`` after fewer, but for so many at least, such that they do so ``AGREEMENTS`` times.

    A chain of overlapping requests that no region takes (it is longer, or one rank wants more of it, the same
    bytes twice perhaps) is cut between two requests. Where these overlap, both regions read the bytes, less
    than ``limit`` of them, and ``served`` and the plan count them twice: a request comes in one message.
    """
    load, served = ([0] * len(tables.of_rank) for _ in range(2))
    alone: list[list[int]] = [[] for _ in tables.different]
    regions = []
    for region in _regions(tables.different, limit):
        # One rank's region is read by it alone, in no step; its bytes count as its load when servers are
        # chosen.
        first, *more = region.wants
        if more or len(tables.holders[first.table]) > 1:
            regions.append(region)
            continue
        alone[first.table] += range(first.first, first.stop)
        load[tables.holders[first.table][0]] += first.nbytes
    steps: list[ExchangeStep | Agreement] = []
    if least is not None:
        share = sum(region.end - region.begin for region in regions) // (AGREEMENTS * len(load))
        between = min(between, max(least, share))
    agreed = 0
    # A rank has one table, so that what it has to read changes in one heap alone.
    free = [[(load[rank], rank) for rank in holders] for holders in tables.holders]
    for heap in free:
        heapq.heapify(heap)
    # In the order of the files, by every rank alike: ties go to the lowest rank.
    for region in regions:
        (read, server), number = min((free[want.table][0], want.table) for want in region.wants)
        # Measured by the busiest server: the others have read less since then.
        if served[server] - agreed >= between:
            agreed = max(served)
            steps.append(Agreement())
        # Deterministic sums of integers: every rank comes to the same loads, and so to the same servers.
        nbytes = region.end - region.begin
        heapq.heapreplace(free[number], (read + nbytes, server))
        served[server] += nbytes
        steps.append(ExchangeStep(server, region.wants, (region.file, region.begin, region.end)))
    of_rank = (tuple(alone[number]) for number in tables.of_rank)
    return Exchange(tuple(steps), tuple(of_rank), tuple(served))


#: A rank that reads this many times slower than the one in the middle is slow.
SLOW = 2.0


def reassigned(
    steps: Sequence[ExchangeStep | Agreement], speeds: Sequence[float], tables: Tables
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
    longest = max((step.nbytes for step in steps if isinstance(step, ExchangeStep)), default=0)
    turns = _Turns(rates, longest)
    of_table = [turns.among(holders) for holders in tables.holders]
    of_fast = turns.among(fast)
    is_able = [any(rates[rank] * SLOW >= middle for rank in holders) for holders in tables.holders]
    begun: set[int] = set()
    made: list[ExchangeStep | Agreement] = []
    for step in steps:
        if isinstance(step, Agreement):
            made.append(step)
            continue
        server = step.server
        if server in begun:
            wanting = [of_table[want.table] for want in step.wants]
            if not any(is_able[want.table] for want in step.wants):
                wanting.append(of_fast)
            server = turns.next(wanting)
        begun.add(step.server)
        turns.add(server, step.nbytes)
        made.append(step if server == step.server else replace(step, server=server))
    return made


class _Turns:
    """Whose turn it is to read, by when each rank would have read ``longest`` bytes more.

    ``rates`` are in bytes a second. Groups of ranks are heaps, for there may be thousands; what a rank reads
    for one of them puts it back in the others when they come to it.
    """

    def __init__(self, rates: Sequence[float], longest: int) -> None:
        self._rates = rates
        self._ends = [longest / rate for rate in rates]

    def among(self, ranks: Iterable[int]) -> list[tuple[float, int]]:
        """A group of ``ranks``."""
        heap = [(self._ends[rank], rank) for rank in ranks]
        heapq.heapify(heap)
        return heap

    def next(self, groups: Sequence[list[tuple[float, int]]]) -> int:
        """The rank of these groups whose turn it is; the lowest of several."""
        for heap in groups:
            while heap and heap[0][0] != self._ends[heap[0][1]]:
                heapq.heapreplace(heap, (self._ends[heap[0][1]], heap[0][1]))
        return min(heap[0] for heap in groups if heap)[1]

    def add(self, rank: int, nbytes: int) -> None:
        """Note that ``rank`` reads so many bytes."""
        self._ends[rank] += nbytes / self._rates[rank]


def slow_ranks(speeds: Sequence[float]) -> set[int]:
    """The ranks that read much slower than the one in the middle; 0 tells nothing of a rank."""
    known = [speed for speed in speeds if speed > 0]
    middle = statistics.median(known) if known else 0.0
    return {rank for rank, speed in enumerate(speeds) if 0 < speed * SLOW < middle}


def given_away(
    tables: Tables, speeds: Sequence[float], between: int = 1 << 62
) -> list[ExchangeStep | Agreement]:
    """Steps for requests that their ranks have not come to, each read by any rank.

    Ranks read in proportion to their ``speeds``, in bytes a second. A step has one request, whose rows, if it
    has several, lie so close that all between them is read.
    """
    known = [speed for speed in speeds if speed > 0]
    middle = statistics.median(known) if known else 1.0
    rates = [speed if speed > 0 else middle for speed in speeds]
    longest = max((int(table[:, 2].max()) for table in tables.different if len(table)), default=0)
    turns = _Turns(rates, longest)
    everybody = [turns.among(range(len(rates)))]
    steps: list[ExchangeStep | Agreement] = []
    passed = 0
    # In turns, so that all that have given something away get some of it at a time.
    for turn in range(max(map(len, tables.different), default=0)):
        for number, table in enumerate(tables.different):
            if turn >= len(table):
                continue
            file, offset, nbytes, rows, stride = table[turn].tolist()
            extent = file, offset, offset + (rows - 1) * stride + nbytes // rows
            server = turns.next(everybody)
            turns.add(server, extent[2] - offset)
            if passed >= between:
                steps.append(Agreement())
                passed = 0
            passed += extent[2] - offset
            steps.append(ExchangeStep(server, (Want(number, turn, turn + 1, nbytes),), extent))
    return steps


class _Region:
    """Requests that overlap or, of tables that are in it already, follow closely."""

    def __init__(self, file: int, begin: int) -> None:
        self.file, self.begin, self.end = file, begin, begin
        self._wanted: dict[int, Want] = {}  # by number of the table

    @property
    def wants(self) -> tuple[Want, ...]:
        return tuple(self._wanted.values())

    def takes(self, file: int, begin: int, end: int, table: int, nbytes: int, limit: int) -> bool:
        # Both the message to a rank and the extent that its server reads have to fit buffers of twice the
        # limit.
        message = nbytes + (self._wanted[table].nbytes if table in self._wanted else 0)
        if file != self.file or max(message, max(end, self.end) - self.begin) > 2 * limit:
            return False
        if begin < self.end:
            return True
        # What only touches is joined for a table that is in the region already, for longer reads and fewer
        # messages; another one's would be sent by a server without need.
        return begin == self.end and table in self._wanted and end - self.begin <= limit

    def add(self, end: int, table: int, number: int, nbytes: int) -> None:
        before = self._wanted.get(table, Want(table, number, number, 0))
        self._wanted[table] = Want(table, before.first, number + 1, before.nbytes + nbytes)
        self.end = max(self.end, end)


def _regions(tables: Sequence[Table], limit: int) -> Iterator[_Region]:
    region: _Region | None = None
    for file, begin, end, table, number, nbytes in _sorted(tables):
        if region is None or not region.takes(file, begin, end, table, nbytes, limit):
            if region is not None:
                yield region
            region = _Region(file, begin)
        region.add(end, table, number, nbytes)
    if region is not None:
        yield region


def _sorted(tables: Sequence[Table]) -> Iterator[list[int]]:
    """All requests by place: file, first byte, one past the last, table, number, bytes."""
    columns = []
    for which, table in enumerate(tables):
        file, offset, nbytes, rows, stride = table.T
        # A request of several rows spans the gaps between them too, which its server reads along.
        end = offset + (rows - 1) * stride + nbytes // np.maximum(rows, 1)
        columns.append(
            np.stack([file, offset, end, np.full(len(table), which), np.arange(len(table)), nbytes])
        )
    every = np.concatenate(columns, axis=1) if columns else np.empty((6, 0), np.int64)
    # The last key is the first to be sorted by: file, first byte, then table and number, so that ties fall
    # alike on every rank.
    order = np.lexsort((every[4], every[3], every[1], every[0]))
    # As Python integers, but not all at once: they take ten times the room.
    for start in range(0, len(order), 1 << 14):
        yield from every[:, order[start : start + (1 << 14)]].T.tolist()


def in_rounds(reads: Sequence[Read], sizes: Sequence[int], rounds: int) -> list[tuple[Read, ...]]:
    """``reads`` by rounds, each of files that follow each other, all of about as many bytes.

    ``sizes`` are those of the files, the same on all ranks. No file is cut: its requests may overlap.
    """
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    # By where the middle of a file lies among all bytes.
    of_file = ((ends - np.array(sizes, np.int64) / 2) * rounds / max(1, total)).astype(np.int64)
    made: list[list[Read]] = [[] for _ in range(rounds)]
    for read in reads:
        made[min(rounds - 1, int(of_file[read.file]))].append(read)
    return [tuple(some) for some in made]


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
