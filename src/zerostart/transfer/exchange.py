"""Going through a list of steps (``planning.exchange``): reading, sending and receiving.

The list settles the number and size of all messages. A rank that fails goes on receiving and sending, of
whatever content, up to the next agreement or to the end, so that no other rank waits for it; there all raise
its error.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from zerostart.distributed.interrupts import HeldSignals
from zerostart.distributed.world import World
from zerostart.errors import PeerError
from zerostart.transfer import MemoryReader, Reader, Rows, bytes_view
from zerostart.transfer.messages import pack, place_rows, send_or_receive
from zerostart.transfer.planning import Agreement, ExchangeStep, Table


class ExchangeReader(Reader):
    """Gives the bytes of this rank's requests, in their order, to one thread; a ``Reader`` for ``execute``.

    All memory is taken at once, before the first message: room for the longest one and, where this rank
    serves extents, for two of those, one being read by ``threads`` while the other is sent.
    """

    def __init__(
        self,
        steps: Sequence[ExchangeStep | Agreement],
        tables: Sequence[Table],
        reader: Reader,
        world: World,
        threads: int = 1,
    ) -> None:
        me = world.rank
        own = [e for e in steps if isinstance(e, Agreement) or _concerns(e, me)]
        extents = [e.extent for e in own if isinstance(e, ExchangeStep) and e.server == me]
        self._steps = iter(own)
        self._extents = iter(extents)
        self._tables = tables
        self._reader = reader
        self._world = world
        self._threads = threads
        self._message = _room(
            d.nbytes
            for e in own
            if isinstance(e, ExchangeStep)
            for d in e.deliveries
            if me in (e.server, d.to)
        )
        self._rooms = [_room(end - begin for _, begin, end in extents[turn::2]) for turn in range(2)]
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="zerostart-extents")
        self._left = memoryview(b"")  # of the last message to this rank
        self._ahead: tuple[torch.Tensor, list[Future[None]]] | None = None
        self._failure: BaseException | None = None
        self.read_bytes = 0  #: read by this rank, for itself and for others
        self.received_bytes = 0  #: got from others

    def __enter__(self) -> ExchangeReader:
        """Begin, with all others. From here on they wait for this rank, which fails at a step."""
        with HeldSignals() as signals:
            self._world.raise_together(None, "beginning to exchange")
            try:
                self._reader.__enter__()
                self._fetch()
                signals.deliver()
            except BaseException as error:
                self._failure = error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Run the steps that are left: others wait for their bytes. Raises what failed on the way."""
        self._failure = self._failure or error
        with HeldSignals() as signals:
            try:
                if not isinstance(error, PeerError):
                    while self._run():
                        pass
            finally:
                self._pool.shutdown(cancel_futures=True)
                self._reader.__exit__(kind, error, trace)
        if error is None:
            if self._failure is not None:
                raise self._failure
            signals.deliver()

    def read(self, file: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill ``buffers`` with the next request's bytes. Raises RuntimeError without one."""
        self._next()
        for buffer in buffers:
            buffer[:] = self._left[: len(buffer)]
            self._left = self._left[len(buffer) :]

    def gather(self, file: int, offset: int, rows: Rows, target: memoryview, step: int) -> None:
        """Fill the rows of ``target`` with the next request's bytes. Raises RuntimeError without one."""
        self._next()
        self._left = place_rows(self._left, rows, target, step)

    def announce(self, file: int, offset: int, rows: Rows) -> None:
        """All ranks know what is read."""

    def _next(self) -> None:
        """Run steps until the next request's bytes are there."""
        while not self._left:
            if not self._run():
                raise RuntimeError("more was asked for than the list of steps has")
            if self._failure is not None:
                raise self._failure

    def _run(self) -> bool:
        """Run the next step, whole; False if there is none. Raises at an agreement if a rank has failed."""
        with HeldSignals() as signals:
            going = self._step()
        signals.deliver()
        return going

    def _step(self) -> bool:
        step = next(self._steps, None)
        if step is None:
            return False
        if isinstance(step, Agreement):
            self._agree()
        elif step.server == self._world.rank:
            self._serve(step)
        else:
            (own,) = (delivery for delivery in step.deliveries if delivery.to == self._world.rank)
            send_or_receive(dist.recv, self._message[: own.nbytes], step.server, self._world)
            self._left = bytes_view(self._message)[: own.nbytes]
            self.received_bytes += own.nbytes
        return True

    def _agree(self) -> None:
        try:
            self._world.raise_together(self._failure, "exchanging what was read")
        except BaseException:
            self._steps = iter(())  # all have stopped here
            raise

    def _serve(self, step: ExchangeStep) -> None:
        """Send to each what it asked for; a failure is kept, and the message sent all the same.

        The next ranks come first. With servers that follow each other in a list of steps, each then passes
        on what it has while the one before is still sending. This rank's own bytes come last: they stay in
        the message until the caller has taken them.
        """
        me, size = self._world.rank, self._world.size
        reader: Reader = MemoryReader([])
        try:
            reader = self._fetched()
        except BaseException as error:
            self._failure = self._failure or error
        for delivery in sorted(step.deliveries, key=lambda delivery: (delivery.to - me - 1) % size):
            room = self._message[: delivery.nbytes]
            try:
                if self._failure is None:
                    requests = self._tables[delivery.to][delivery.first : delivery.stop]
                    pack(bytes_view(room), requests, reader, step.extent[1])
            except BaseException as error:
                self._failure = error
            if delivery.to != me:
                send_or_receive(dist.send, room, delivery.to, self._world)
            else:
                self._left = bytes_view(room)

    def _fetch(self) -> None:
        """Have the next extent read that this rank serves, a part by each thread."""
        extent = next(self._extents, None)
        if extent is None:
            self._ahead = None
            return
        file, begin, end = extent
        room = self._rooms[0][: end - begin]
        self._rooms.reverse()
        part = -(-(end - begin) // self._threads)
        parts = [
            self._pool.submit(self._reader.read, file, begin + at, [bytes_view(room)[at : at + part]])
            for at in range(0, end - begin, part)
        ]
        self._ahead = room, parts

    def _fetched(self) -> Reader:
        """The extent that is being read, as a reader; the one after it is asked for."""
        assert self._ahead is not None, "a step with an extent is served"
        room, parts = self._ahead
        for part in parts:
            failure = part.exception()
            self._failure = self._failure or failure
        self.read_bytes += len(room)
        if self._failure is None:
            self._fetch()
        return MemoryReader([room])


def _concerns(step: ExchangeStep, rank: int) -> bool:
    return step.server == rank or any(delivery.to == rank for delivery in step.deliveries)


def _room(sizes: Any) -> torch.Tensor:
    return torch.empty(max(sizes, default=0), dtype=torch.uint8, device="cpu")
