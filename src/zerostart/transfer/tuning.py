"""How a load reads: threads and chunk size, by what the storage and the machine are like.

A thread has one read in flight. Bytes in the page cache are copied by processors: more threads only hinder
each other. Measured on two cores: warm 11.7 GB/s at 2 threads and 5.3 at 8, cold 1.1 GB/s at 2 and 2.1 at 8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rich.filesize import decimal

from zerostart.checkpoint.storage import Reader, RequestCost, Storage
from zerostart.checkpoint.storage.direct import BOUNCE_BYTES
from zerostart.distributed.machine import available_memory, cores, local_ranks
from zerostart.transfer.buffers import rounds_up
from zerostart.transfer.planning import Plan, PlanOptions

MiB = 1 << 20
#: A chunk has to hold at least one element of any type, and a useful number of them.
MIN_CHUNK = 1 << 16
CHUNK = 8 * MiB
#: Most bytes of all staging and bounce buffers of a rank by default: on the host, and to an accelerator.
RING, DEVICE_RING = 48 * MiB, 128 * MiB
#: Reads in flight on a machine: for a disk, and for a network file system.
DISK_DEPTH, NETWORK_DEPTH = 16, 32
#: Chunks that an exchange takes: a batch that is read, one that is sent, one that is received, and staging.
EXCHANGE_CHUNKS = 4
#: Requests to a store that a rank has in flight, at least and at most: each of a whole chunk, and of those
#: that are shorter and need no room.
LEAST_DEPTH, CHUNKS_DEPTH, MOST_DEPTH = 4, 16, 64
#: Bytes a second of a machine's line to a store, for which it has enough requests in flight.
LINE_RATE = 12.5e9
#: Most bytes of a rank's buffers for a store: what is in flight there is what hides its latency.
STORE_RING = 128 * MiB
#: Largest gap that is read through in a store: a share of the run before it, or so many bytes with the run.
STORE_GAP_SHARE, STORE_GAP_FLOOR = 0.02, 64 << 10
#: Least bytes that a machine's ranks read together for direct reads: less is kept for the next start.
LEAST_DIRECT = 2 << 30
#: Most times that the ranks of a machine together may read its files round the page cache.
MOST_OVER = 1.5
#: Share of the bytes in memory from which on a checkpoint counts as warm.
WARM = 0.9


#: Processors from which on a push takes a second thread: trainer ranks and workers share them.
BUSY = 8


def push_threads() -> int:
    """Threads of a process that moves weights to or from others on its machine, and sums them up."""
    return 2 if cores() >= BUSY else 1


@dataclass(frozen=True, slots=True)
class Rates:
    """Assumed speeds, in bytes a second."""

    #: Of one machine's link to storage, or of its disk.
    link: float = 2e9
    #: Of one machine's copies out of its page cache.
    copy: float = 8e9
    #: Of one rank's messages.
    interconnect: float = 1e9


@dataclass(frozen=True)
class Tuning:
    """How this rank reads."""

    #: Threads, each with one read in flight.
    threads: int
    #: Most bytes of one read, and of one staging buffer.
    chunk_size: int
    #: Staging buffers of each thread.
    depth: int = 1
    #: Whether bytes come from storage, so that the kernel is told what will be read.
    cold: bool = False
    #: Whether reads of a large load go round the page cache.
    direct: bool = False
    file_system: str = ""
    #: Share of the checkpoint in the page cache; None if nobody knows.
    resident: float | None = 1.0
    #: Whether bytes come from a storage that all clients share.
    remote: bool = False
    #: Most bytes of all buffers together.
    limit: int = RING
    #: How many ranks read on this machine.
    ranks: int = 1
    #: Bytes that the storage's own reader takes for each thread.
    buffer: int = 0
    #: What a request to the storage takes; None where reads are no requests.
    cost: RequestCost | None = None
    #: Bytes of a request on average, where that is known.
    request_bytes: int = 0

    @property
    def ring_bytes(self) -> int:
        """Most host memory that reading takes beside the destinations, with own slices."""
        return self.threads * self.depth * self.chunk_size + self._reader_bytes

    def options(self, chunk_size: int | None = None) -> PlanOptions:
        """How reads are cut and merged, in chunks of another size where ranks read for each other."""
        chunk = self.chunk_size if chunk_size is None else chunk_size
        if self.cost is None:
            return PlanOptions(chunk)
        return PlanOptions(chunk, STORE_GAP_SHARE, min(STORE_GAP_FLOOR, self.cost.gap))

    @property
    def exchange_chunk(self) -> int:
        """Most bytes of a request where ranks read for each other; 0 if the limit leaves no room for that."""
        room = max(0, self.limit - self._reader_bytes)
        return min(self.chunk_size, room // EXCHANGE_CHUNKS) // MIN_CHUNK * MIN_CHUNK

    @property
    def _reader_bytes(self) -> int:
        return self.threads * (self.buffer + BOUNCE_BYTES * self.direct)

    @property
    def rates(self) -> Rates:
        """What the storage is taken to give, for the seconds of a forecast."""
        if not self.cold:
            return Rates(link=math.inf)
        if self.cost is None:
            return Rates()
        # Each request's share of its time is latency.
        stream = self.chunk_size / (self.cost.latency + self.chunk_size / self.cost.rate)
        return Rates(link=stream * self.threads * self.ranks)

    def suited(self, plan: Plan) -> Tuning:
        """Return the setting with as many threads as fill the line to a store with the plan's requests."""
        reads = [read for read in plan.reads if read.nbytes]
        if self.cost is None or not reads or plan.computations:
            return self
        staged = max((read.nbytes for read in reads if not read.direct), default=0)
        if staged and rounds_up():
            staged = 1 << (staged - 1).bit_length()
        room = self.limit // max(1, self.depth * staged + self.buffer)
        mean = sum(read.nbytes for read in reads) / len(reads)
        stream = mean / (self.cost.latency + mean / self.cost.rate)
        wanted = min(MOST_DEPTH, math.ceil(LINE_RATE / self.ranks / stream))
        return replace(self, threads=max(self.threads, min(wanted, room)), request_bytes=int(mean))

    def reader(self, plan: Plan) -> Reader:
        """What the plan's reads are made with."""
        suits = LEAST_DIRECT <= plan.read_bytes * self.ranks <= MOST_OVER * plan.storage.nbytes
        return plan.storage.reader(cold=self.cold, direct=self.direct and suits)

    def describe(self, reader: Reader | None = None) -> str:
        """What was set, and what a reader found that was used, in one line for a person."""
        chunk = decimal(self.chunk_size)
        words = [f"{self.threads} threads x {chunk}" + (f" x {self.depth}" if self.depth > 1 else "")]
        if self.cost is not None:
            # Threads with a request each, which may be much shorter than a chunk.
            mean = self.request_bytes
            each = f"{decimal(mean)} on average" if mean else f"up to {chunk}"
            words = [f"up to {self.threads} requests of {each} in flight"]
        if self.file_system:
            cached = "" if self.resident is None else f", {self.resident:.0%} in the page cache"
            words.append(f"{self.file_system}{cached}")
        if reader is not None and (note := reader.note()):
            words.append(note)
        return "; ".join(words)


def tune(
    storage: Storage,
    staged_on_device: bool,
    computes: bool = False,
    memory_limit: int | None = None,
    chunk_size: int | None = None,
    ranks: int | None = None,
) -> Tuning:
    """Choose how to read from ``storage`` with ``ranks`` ranks on this machine.

    ``memory_limit`` caps all buffers together: chunks shrink first, then threads.
    """
    ranks = ranks or local_ranks()
    share = max(1, math.floor(cores() / ranks))
    depth = 2 if staged_on_device else 1
    found = storage.residency()
    cold = (found.resident or 0.0) < WARM
    if not cold:
        # 1. Warm: reads are copies by processors, of which this rank has its share.
        threads = max(2, min(8, share))
    else:
        # 2. Cold: the queue of the disk or the network file system is shared by the ranks of the machine.
        threads = max(4, min(8, (NETWORK_DEPTH if found.remote else DISK_DEPTH) // ranks))
    if found.depth:
        # 3. A store: as many requests as hide its latency, whatever the processors.
        threads = max(LEAST_DEPTH, min(CHUNKS_DEPTH, found.depth // ranks))
    tuning = Tuning(
        threads=threads,
        chunk_size=chunk_size or CHUNK,
        depth=depth,
        cold=cold,
        direct=cold and found.direct,
        file_system=found.kind,
        resident=found.resident,
        remote=found.remote,
        ranks=ranks,
        buffer=found.buffer,
        cost=storage.cost,
    )
    tuning = _within(tuning, computes, memory_limit, chunk_size, DEVICE_RING if staged_on_device else RING)
    if staged_on_device and rounds_up():  # so that nothing is added to a chunk
        tuning = replace(tuning, chunk_size=1 << (tuning.chunk_size.bit_length() - 1))
    return tuning


def _within(tuning: Tuning, computes: bool, limit: int | None, chunk_size: int | None, ring: int) -> Tuning:
    # Without a limit an eighth of the free memory, shared by the machine's ranks, and never more than the
    # ring.
    ring = ring if tuning.cost is None else STORE_RING
    share = available_memory() // 8 // tuning.ranks
    most = limit if limit is not None else min(ring, max(4 * MiB, share))
    threads, direct, chunk = tuning.threads, tuning.direct, tuning.chunk_size
    depth = tuning.depth if most >= (tuning.depth + computes) * MIN_CHUNK else 1
    chunks = depth + computes  # of each thread
    # Direct reads need an aligned buffer more for each thread; where that leaves too little for chunks, they
    # are given up first.
    if direct and most < threads * (BOUNCE_BYTES + chunks * MIN_CHUNK):
        direct = False
    # A reader that has buffers of its own has them for each thread: half of the room at most is for them.
    if tuning.buffer:
        threads = max(1, min(threads, most // (2 * tuning.buffer)))
    room = max(chunks * MIN_CHUNK, most - threads * (BOUNCE_BYTES * direct + tuning.buffer))
    if chunk_size is None:
        each = room // (threads * chunks)
        # Whole MiB where there are any; below one rather fewer threads.
        each = each // MiB * MiB if each >= MiB else min(MiB, room // chunks)
        chunk = min(chunk, max(MIN_CHUNK, each))
    elif limit is not None:
        # A chunk that the caller asked for is cut down only for a limit that the caller set as well.
        chunk = max(MIN_CHUNK, min(chunk, room // chunks))
    if chunk_size is None or limit is not None:
        threads = max(1, min(threads, room // (chunks * chunk)))
    return replace(tuning, threads=threads, chunk_size=chunk, depth=depth, direct=direct, limit=most)
