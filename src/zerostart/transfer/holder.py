"""Reading from a mapping of tensors that one rank holds: it serves those that do not, round after round.

In a round each rank that wants something sends the list of its next requests, and gets their bytes in the
order of that list. Nobody but the holder knows of the others' requests, and it of those of one round, which
are bounded however many ranks and requests there are.

With its list a rank says whether it has failed, and the holder answers whether anybody has. So a failure ends
all at the next round; until then everybody sends and receives what was announced, of whatever content.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType

import numpy as np
import torch
import torch.distributed as dist

from zerostart.checkpoint.storage import Reader, Rows
from zerostart.distributed.interrupts import HeldSignals
from zerostart.distributed.world import World
from zerostart.errors import PeerError
from zerostart.transfer.messages import pack, place_rows, send_or_receive
from zerostart.transfer.planning import Table, batches
from zerostart.transfer.staging import bytes_view

#: Requests and bytes of all ranks together in one round. A list takes 40 bytes a request.
ROUND_REQUESTS, ROUND_BYTES = 1 << 16, 1 << 30
_BEGIN, _DURING = "beginning to read from the mapping", "reading from the mapping"


class HeldReader(Reader):
    """Gives the bytes of this rank's requests, in their order, to one thread; a ``Reader`` for ``execute``.

    ``holder`` has them, and serves ``ranks`` ranks in messages that are as long as ``room`` at most.
    """

    def __init__(self, table: Table, holder: int, ranks: int, room: torch.Tensor, world: World) -> None:
        self._table = table
        self._holder = holder
        self._ranks = ranks
        self._world = world
        self._room = room
        self._next = 0  # the first request that no list had
        self._coming: Iterator[tuple[int, int, int]] = iter(())  # messages of this round
        self._left = memoryview(b"")  # of the last message
        self._ended = not len(table)
        self._failure: BaseException | None = None
        self.received_bytes = 0

    def __enter__(self) -> HeldReader:
        """Begin, with all others. From here on the holder waits for this rank, which fails when it reads."""
        with HeldSignals() as signals:
            self._world.raise_together(None, _BEGIN)
            try:
                signals.deliver()
            except BaseException as interrupt:
                self._failure = interrupt
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Receive what is left of the round, and say that this rank wants no more, or that it has failed."""
        if isinstance(error, PeerError):
            return
        with HeldSignals() as signals:
            while not self._ended and self._receive():
                pass
            failed = error is not None or self._failure is not None
            if not self._ended:
                self._send(torch.tensor([int(failed), 0], device="cpu"))
        if error is None:
            if self._failure is not None:
                raise self._failure
            signals.deliver()

    def read(self, file: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill ``buffers`` with the next request's bytes. Raises RuntimeError without one."""
        self._wait()
        for buffer in buffers:
            buffer[:] = self._left[: len(buffer)]
            self._left = self._left[len(buffer) :]

    def gather(self, file: int, offset: int, rows: Rows, target: memoryview, step: int) -> None:
        """Fill the rows of ``target`` with the next request's bytes. Raises RuntimeError without one."""
        self._wait()
        self._left = place_rows(self._left, rows, target, step)

    def announce(self, file: int, offset: int, rows: Rows) -> None:
        """The list says what is read."""

    def _wait(self) -> None:
        """Receive until the next request's bytes are there."""
        if self._failure is not None:
            raise self._failure
        while not self._left:
            with HeldSignals() as signals:
                if not self._receive():
                    self._ask()
            signals.deliver()

    def _receive(self) -> bool:
        """The next message of this round; False if there is none."""
        batch = next(self._coming, None)
        if batch is None:
            return False
        nbytes = batch[2]
        send_or_receive(dist.recv, self._room[:nbytes], self._holder, self._world)
        self._left = bytes_view(self._room)[:nbytes]
        self.received_bytes += nbytes
        return True

    def _ask(self) -> None:
        """Begin a round. Raises what another rank has failed with."""
        first = self._next
        sizes = self._table[first : first + max(1, ROUND_REQUESTS // self._ranks), 2]
        count = max(1, int(np.searchsorted(np.cumsum(sizes), ROUND_BYTES // self._ranks, side="right")))
        self._next = first + min(count, len(sizes))
        if self._next == first:
            raise RuntimeError("more was asked for than this rank's list has")
        self._send(torch.tensor([0, self._next - first], device="cpu"))
        self._send(torch.from_numpy(self._table[first : self._next]))
        answer = torch.zeros(1, dtype=torch.int64, device="cpu")
        send_or_receive(dist.recv, answer, self._holder, self._world)
        if answer.item():
            self._ended = True
            self._world.raise_together(None, _DURING)
        self._coming = batches(self._table[first : self._next, 2].tolist(), len(self._room))

    def _send(self, tensor: torch.Tensor) -> None:
        send_or_receive(dist.send, tensor, self._holder, self._world)


def serve_others(ranks: Sequence[int], reader: Reader, room: torch.Tensor, world: World) -> int:
    """Serve ``ranks`` with what ``reader`` gives until they want no more; the bytes that were sent.

    Messages are as long as ``room`` at most. Raises what went wrong once all others know that something has.
    """
    failure: BaseException | None = None
    sent, left = 0, list(ranks)
    with HeldSignals() as signals:
        world.raise_together(None, _BEGIN)
        while left:
            lists, failed = _lists(left, world)
            try:
                signals.deliver()
            except BaseException as interrupt:
                failure = interrupt
            left, stop = list(lists), failed or failure is not None
            for rank in left:
                answer = torch.tensor([int(stop)], device="cpu")
                send_or_receive(dist.send, answer, rank, world)
            if stop:
                world.raise_together(failure, _DURING)
            for rank, table, nbytes in _messages(lists, len(room)):
                try:
                    if failure is None:
                        pack(bytes_view(room[:nbytes]), table, reader)
                except BaseException as error:
                    failure = error
                send_or_receive(dist.send, room[:nbytes], rank, world)
                sent += nbytes
    if failure is not None:  # in the last round
        raise failure
    signals.deliver()
    return sent


def _lists(ranks: Sequence[int], world: World) -> tuple[dict[int, Table], bool]:
    """The lists of the ranks that want more, and whether one has failed."""
    lists: dict[int, Table] = {}
    failed = False
    for rank in ranks:
        head = torch.zeros(2, dtype=torch.int64, device="cpu")
        send_or_receive(dist.recv, head, rank, world)
        failed |= bool(head[0])
        if head[1]:
            table = torch.zeros(int(head[1]), 5, dtype=torch.int64, device="cpu")
            send_or_receive(dist.recv, table, rank, world)
            lists[rank] = table.numpy()
    return lists, failed


def _messages(lists: dict[int, Table], limit: int) -> Iterator[tuple[int, Table, int]]:
    """To each rank in turn one message: the rank, the requests in it, and bytes."""
    turns = {rank: batches(table[:, 2].tolist(), limit) for rank, table in lists.items()}
    while turns:
        for rank in list(turns):
            batch = next(turns[rank], None)
            if batch is None:
                del turns[rank]
            else:
                first, stop, nbytes = batch
                yield rank, lists[rank][first:stop], nbytes
