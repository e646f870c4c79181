"""Settings of a load: threads and chunk size for the storage and the machine.

A thread has one read in flight. Processors copy bytes out of the page cache, so more threads only disturb
each other. Measured on two cores: warm 11.7 GB/s with 2 threads and 5.3 with 8, cold 1.1 GB/s with 2 and 2.1
with 8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rich.filesize import decimal

from zerostart.checkpoint.storage import Reader, RequestCost, Storage
from zerostart.checkpoint.storage.direct import BOUNCE_BYTES
from zerostart.distributed.machine import available_memory, cores, local_ranks
from zerostart.transfer.planning import Plan, PlanOptions

MiB = 1 << 20
#: Minimum chunk, in bytes.
MIN_CHUNK = 1 << 16
CHUNK = 8 * MiB
#: Default limits of all buffers of a rank, in bytes: on the host, and for an accelerator.
RING, DEVICE_RING = 48 * MiB, 128 * MiB
#: Reads in flight per machine: for a disk, and for a network file system.
DISK_DEPTH, NETWORK_DEPTH = 16, 32
#: Chunks of an exchange: one read, one sent, one received, and staging.
EXCHANGE_CHUNKS = 4
#: Requests in flight of a rank: minimum, maximum of whole chunks, and maximum.
LEAST_DEPTH, CHUNKS_DEPTH, MOST_DEPTH = 4, 16, 64
#: Rate of a machine's line to a store, in bytes a second; requests should fill it.
LINE_RATE = 12.5e9
#: Limit of a rank's buffers for a store, in bytes; requests in flight hide its latency.
STORE_RING = 128 * MiB
#: Largest gap that a store reads through: share of the run before it, or bytes with the run.
STORE_GAP_SHARE, STORE_GAP_FLOOR = 0.02, 64 << 10
#: Minimum bytes of a machine's ranks for direct reads; smaller files stay in the page cache.
LEAST_DIRECT = 2 << 30
#: Maximum ratio of read bytes to file bytes for direct reads of a machine.
MOST_OVER = 1.5
#: Share of a checkpoint in the page cache from which it counts as warm.
WARM = 0.9


#: Number of processors from which a push uses a second thread.
BUSY = 8


def push_threads() -> int:
    """Return the number of threads of a push."""
    return 2 if cores() >= BUSY else 1


@dataclass(frozen=True, slots=True)
class Rates:
    """Assumed speeds, in bytes a second."""

    #: One machine's link to storage, or its disk.
    link: float = 2e9
    #: One machine's copies out of its page cache.
    copy: float = 8e9
    #: One rank's messages.
    interconnect: float = 1e9


@dataclass(frozen=True)
class Tuning:
    """Read settings of this rank."""

    #: Threads, each with one read in flight.
    threads: int
    #: Maximum size of a read, and of a staging buffer, in bytes.
    chunk_size: int
    #: Staging buffers per thread.
    depth: int = 1
    #: True if bytes come from storage, not from the page cache.
    cold: bool = False
    #: True if reads of a large load bypass the page cache.
    direct: bool = False
    file_system: str = ""
    #: Share of the checkpoint in the page cache; None if unknown.
    resident: float | None = 1.0
    #: True if all clients share the storage.
    remote: bool = False
    #: Limit of all buffers, in bytes.
    limit: int = RING
    #: Number of ranks that read on this machine.
    ranks: int = 1
    #: Bytes that the storage's reader takes per thread.
    buffer: int = 0
    #: Cost of a request to a store; None for files.
    cost: RequestCost | None = None
    #: Mean size of a request, in bytes; 0 if unknown.
    request_bytes: int = 0

    @property
    def ring_bytes(self) -> int:
        """Maximum bytes of buffers when reading own slices."""
        return self.threads * self.depth * self.chunk_size + self._reader_bytes

    def options(self, chunk_size: int | None = None) -> PlanOptions:
        """Return how reads are cut and merged."""
        chunk = self.chunk_size if chunk_size is None else chunk_size
        if self.cost is None:
            return PlanOptions(chunk)
        return PlanOptions(chunk, STORE_GAP_SHARE, min(STORE_GAP_FLOOR, self.cost.gap))

    @property
    def exchange_chunk(self) -> int:
        """Maximum bytes of a request in an exchange; 0 disables it."""
        room = max(0, self.limit - self._reader_bytes)
        return min(self.chunk_size, room // EXCHANGE_CHUNKS) // MIN_CHUNK * MIN_CHUNK

    @property
    def _reader_bytes(self) -> int:
        return self.threads * (self.buffer + BOUNCE_BYTES * self.direct)

    @property
    def rates(self) -> Rates:
        """Assumed rates of the storage, for a forecast."""
        if not self.cold:
            return Rates(link=math.inf)
        if self.cost is None:
            return Rates()
        # Latency takes a part of each request's time.
        stream = self.chunk_size / (self.cost.latency + self.chunk_size / self.cost.rate)
        return Rates(link=stream * self.threads * self.ranks)

    def fit_to_plan(self, plan: Plan) -> Tuning:
        """Add threads until requests fill the line to a store."""
        reads = [read for read in plan.reads if read.nbytes]
        if self.cost is None or not reads or plan.computations:
            return self
        staged = max((read.nbytes for read in reads if not read.direct), default=0)
        room = self.limit // max(1, self.depth * staged + self.buffer)
        mean = sum(read.nbytes for read in reads) / len(reads)
        stream = mean / (self.cost.latency + mean / self.cost.rate)
        needed = min(MOST_DEPTH, math.ceil(LINE_RATE / self.ranks / stream))
        return replace(self, threads=max(self.threads, min(needed, room)), request_bytes=int(mean))

    def reader(self, plan: Plan) -> Reader:
        """Return the reader for the plan's reads."""
        suits = LEAST_DIRECT <= plan.read_bytes * self.ranks <= MOST_OVER * plan.storage.nbytes
        return plan.storage.reader(cold=self.cold, direct=self.direct and suits)

    def describe(self, reader: Reader | None = None) -> str:
        """Describe the settings, and the reader's findings, in one line."""
        chunk = decimal(self.chunk_size)
        words = [f"{self.threads} threads x {chunk}" + (f" x {self.depth}" if self.depth > 1 else "")]
        if self.cost is not None:
            # Each thread has one request, often shorter than a chunk.
            mean = self.request_bytes
            size = f"{decimal(mean)} on average" if mean else f"up to {chunk}"
            words = [f"up to {self.threads} requests of {size} in flight"]
        if self.file_system:
            cached = "" if self.resident is None else f", {self.resident:.0%} in the page cache"
            words.append(f"{self.file_system}{cached}")
        if reader is not None and (note := reader.describe_reads()):
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
    """Choose how ``ranks`` ranks on this machine read ``storage``.

    ``memory_limit`` caps all buffers together: chunks shrink first, then threads.
    """
    ranks = ranks or local_ranks()
    share = max(1, math.floor(cores() / ranks))
    depth = 2 if staged_on_device else 1
    residency = storage.residency()
    cold = (residency.resident or 0.0) < WARM
    if not cold:
        # 1. Warm: reads are copies by the processors that this rank shares.
        threads = max(2, min(8, share))
    else:
        # 2. Cold: the machine's ranks share the queue of the disk or the network file system.
        threads = max(4, min(8, (NETWORK_DEPTH if residency.remote else DISK_DEPTH) // ranks))
    if residency.depth:
        # 3. A store: as many requests as hide its latency.
        threads = max(LEAST_DEPTH, min(CHUNKS_DEPTH, residency.depth // ranks))
    tuning = Tuning(
        threads=threads,
        chunk_size=chunk_size or CHUNK,
        depth=depth,
        cold=cold,
        direct=cold and residency.direct,
        file_system=residency.kind,
        resident=residency.resident,
        remote=residency.remote,
        ranks=ranks,
        buffer=residency.buffer,
        cost=storage.cost,
    )
    return _fit(tuning, computes, memory_limit, chunk_size, DEVICE_RING if staged_on_device else RING)


def _fit(tuning: Tuning, computes: bool, limit: int | None, chunk_size: int | None, ring: int) -> Tuning:
    # Without a limit: an eighth of free memory, divided by the machine's ranks, up to the ring.
    ring = ring if tuning.cost is None else STORE_RING
    share = available_memory() // 8 // tuning.ranks
    max_bytes = limit if limit is not None else min(ring, max(4 * MiB, share))
    threads, direct, chunk = tuning.threads, tuning.direct, tuning.chunk_size
    depth = tuning.depth if max_bytes >= (tuning.depth + computes) * MIN_CHUNK else 1
    chunks = depth + computes  # per thread
    # Direct reads need another aligned buffer per thread, and are given up first.
    if direct and max_bytes < threads * (BOUNCE_BYTES + chunks * MIN_CHUNK):
        direct = False
    # The reader's own buffers take at most half of the room.
    if tuning.buffer:
        threads = max(1, min(threads, max_bytes // (2 * tuning.buffer)))
    room = max(chunks * MIN_CHUNK, max_bytes - threads * (BOUNCE_BYTES * direct + tuning.buffer))
    if chunk_size is None:
        chunk_room = room // (threads * chunks)
        # Whole MiB if possible; below one MiB, fewer threads.
        chunk_room = chunk_room // MiB * MiB if chunk_room >= MiB else min(MiB, room // chunks)
        chunk = min(chunk, max(MIN_CHUNK, chunk_room))
    elif limit is not None:
        # Only a limit of the caller reduces a chunk that the caller chose.
        chunk = max(MIN_CHUNK, min(chunk, room // chunks))
    if chunk_size is None or limit is not None:
        threads = max(1, min(threads, room // (chunks * chunk)))
    return replace(tuning, threads=threads, chunk_size=chunk, depth=depth, direct=direct, limit=max_bytes)
