"""Reading from a mapping that only some ranks hold: the first of them serves the others, chunk by chunk.

A rank without the tensors sends the list of its reads, and gets their bytes in that order, in messages of
at most a chunk. The number of messages is settled by the list: a rank that fails half way still receives (or
sends) the rest, so that no other rank waits for it, and the error is agreed upon afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from zerostart.checkpoint.memory import Memory
from zerostart.errors import PeerError
from zerostart.planning import Plan, Read
from zerostart.transfer import MemoryReader, Progress, Reader, Rows, bytes_view, execute
from zerostart.world import World

__all__ = ["execute_together"]

#: (first read, one past the last, bytes of the message)
Batch = tuple[int, int, int]


def execute_together(
    plan: Plan, storages: Sequence[torch.Tensor], progress: Progress, threads: int, world: World
) -> int:
    """``transfer.execute`` wherever the bytes are; collective where only some ranks hold the tensors.

    Raises PeerError if a rank that serves or is served dies.
    """
    memory = plan.memory
    if memory is None or len(memory.holders) == world.size:
        return execute(plan, storages, progress, threads)
    server = memory.holders[0]
    count = sum(1 for _ in plan.all_reads())
    asked = world.exchange((count, plan.chunk_size), "reading")
    if world.rank == server:
        _serve(memory, asked, world)
    if world.rank in memory.holders:
        return execute(plan, storages, progress, threads)
    return execute(plan, storages, progress, 1, _RemoteReader(plan, server, world))


def _serve(memory: Memory, asked: Sequence[tuple[int, int]], world: World) -> None:
    """Send every rank without the tensors what it asks for, one message to each in turn."""
    tables: dict[int, list[list[int]]] = {}
    turns: dict[int, Iterator[Batch]] = {}
    for rank, (count, chunk) in enumerate(asked):
        if rank not in memory.holders and count:
            table = torch.empty(count, 5, dtype=torch.int64)
            _message(dist.recv, table, rank, world)
            tables[rank] = table.tolist()
            turns[rank] = _batches([row[2] for row in tables[rank]], chunk)
    failure: Exception | None = None
    buffer = torch.empty(0, dtype=torch.uint8)
    with MemoryReader(memory.buffers) as reader:
        while turns:
            for rank in list(turns):
                batch = next(turns[rank], None)
                if batch is None:
                    del turns[rank]
                    continue
                first, stop, nbytes = batch
                if buffer.numel() < nbytes:
                    buffer = torch.empty(nbytes, dtype=torch.uint8)
                try:
                    _fill(buffer, reader, tables[rank][first:stop])
                except Exception as error:  # the message is sent all the same: it is waited for
                    failure = failure or error
                try:
                    _message(dist.send, buffer[:nbytes], rank, world)
                except PeerError as error:  # the others are served before this ends the load
                    failure = error
                    del turns[rank]
    if failure is not None:
        raise failure


def _fill(buffer: torch.Tensor, reader: Reader, reads: Sequence[Sequence[int]]) -> None:
    view = bytes_view(buffer)
    at = 0
    for file, offset, nbytes, count, stride in reads:
        if count == 1:
            reader.read(file, offset, [view[at : at + nbytes]])
        else:
            width = nbytes // count
            reader.gather(file, offset, Rows(count, width, stride), view[at : at + nbytes], width)
        at += nbytes


def _batches(sizes: Sequence[int], limit: int) -> Iterator[Batch]:
    """Consecutive reads that go in one message: at most ``limit`` bytes, but one read at least."""
    first = total = 0
    for number, size in enumerate(sizes):
        if number > first and total + size > limit:
            yield first, number, total
            first, total = number, 0
        total += size
    if len(sizes) > first:
        yield first, len(sizes), total


class _RemoteReader:
    """Gives the bytes of a plan's reads, which must be asked for in order and by one thread."""

    def __init__(self, plan: Plan, server: int, world: World) -> None:
        self._reads: Sequence[Read] = tuple(plan.all_reads())
        self._batches = _batches([read.nbytes for read in self._reads], plan.chunk_size)
        self._server = server
        self._world = world
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._left = memoryview(b"")

    def __enter__(self) -> _RemoteReader:
        if self._reads:
            rows = [(r.file, r.offset, r.nbytes, r.rows, r.stride) for r in self._reads]
            table = torch.tensor(rows, dtype=torch.int64)
            _message(dist.send, table, self._server, self._world)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, PeerError):
            while self._receive():
                pass

    def read(self, file: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill ``buffers`` with the next bytes; the arguments were sent with the list."""
        if not self._left:
            self._receive()
        for buffer in buffers:
            buffer[:] = self._left[: len(buffer)]
            self._left = self._left[len(buffer) :]

    def gather(self, file: int, offset: int, rows: Rows, target: memoryview, step: int) -> None:
        """Fill the rows with the next bytes."""
        self.read(file, offset, [target[i * step : i * step + rows.width] for i in range(rows.count)])

    def _receive(self) -> bool:
        """Take the next message; False if there is none."""
        batch = next(self._batches, None)
        if batch is None:
            return False
        nbytes = batch[2]
        if self._buffer.numel() < nbytes:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8)
        _message(dist.recv, self._buffer[:nbytes], self._server, self._world)
        self._left = bytes_view(self._buffer)[:nbytes]
        return True


def _message(call: Callable[..., Any], tensor: torch.Tensor, peer: int, world: World) -> None:
    """One message to or from a peer."""
    try:
        call(tensor, peer, group=world.group)
    except (RuntimeError, dist.DistBackendError) as error:
        raise PeerError(
            f"rank {peer} died or stopped answering while rank {world.rank} exchanged the tensors of the "
            "mapping with it; nothing was loaded: start all ranks again"
        ) from error
