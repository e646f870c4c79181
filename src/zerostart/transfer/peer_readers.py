"""Readers whose bytes come from other ranks: by steps of an exchange, or from the holder of a mapping.

``ExchangeReader`` goes through a list of steps (``planning.exchange``): reading, sending and receiving. The
list settles the number and size of all messages. A rank that fails goes on receiving and sending, of
whatever content, up to the next agreement or to the end, so that no other rank waits for it; there all raise
its error.

``MappingReader`` reads from a mapping of tensors that another rank holds, which serves those that do not
(``serve_others``), round after round. In a round each rank that wants something sends the list of its next
requests, and gets their bytes in the order of that list. Nobody but the holder knows of the others' requests,
and it of those of one round, which are bounded however many ranks and requests there are. With its list a
rank says whether it has failed, and the holder answers whether anybody has. So a failure ends all at the next
round; until then everybody sends and receives what was announced, of whatever content.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from zerostart.checkpoint.memory import MemoryReader
from zerostart.checkpoint.storage import Reader, Rows
from zerostart.distributed.failures import DeferredSignals, agreed_since, beyond_telling, now
from zerostart.distributed.world import World
from zerostart.errors import PeerError
from zerostart.transfer.planning import (
    Agreement,
    ExchangeStep,
    Routes,
    Table,
    batches,
    part_of,
    reassigned,
    slow_ranks,
)
from zerostart.transfer.staging import bytes_view

#: Seconds of reading between two agreements from which on it is told how fast a rank is: less says little.
TELLING_SECONDS = 0.5


class ExchangeReader(Reader):
    """Gives the bytes of this rank's requests, in their order, to one thread; a ``Reader`` for ``execute``.

    All memory is taken at once, before the first message: room for the longest one, for two extents, one
    being read by ``threads`` while the other is sent, and where a rank passes extents on for one of these.
    At each agreement ranks tell how fast they read; one that is slow gives extents away that it has not
    begun.
    """

    def __init__(
        self,
        steps: Sequence[ExchangeStep | Agreement],
        routes: Routes,
        reader: Reader,
        world: World,
        threads: int = 1,
    ) -> None:
        self._routes = routes
        self._reader = reader
        self._world = world
        self._threads = threads
        self._table = routes.tables.of_rank[world.rank]
        every = [e for e in steps if isinstance(e, ExchangeStep)]
        # Of all ranks' steps, since it may come to any of them.
        longest = max((e.nbytes for e in every), default=0)
        self._message = _room(want.nbytes for e in every for want in e.wants)
        # Extents go to the two rooms in turn: one is sent while the next is being read into the other.
        self._rooms = [_room([longest]), _room([longest])]
        self._passing = _room([longest if routes.machines.relayed else 0])
        # Threads read alone; all messages are sent and received by the thread that calls this reader.
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="zerostart-extents")
        self._left = memoryview(b"")  # of the last message to this rank
        #: The room that is being filled, and the threads' reads into it; None behind the last extent.
        self._ahead: tuple[torch.Tensor, list[Future[float]], float] | None = None
        self._failure: BaseException | None = None
        self._entered = now()
        self._begin(list(steps))
        self._interval = _Measured()
        #: Of all that was read.
        self.measured = _Measured()
        self.planned_bytes = sum(e.nbytes for e in every if e.server == world.rank)
        self.read_bytes = 0  #: read by this rank, for itself and for others
        self.received_bytes = 0  #: got from others
        self.given_bytes = 0  #: that it was to read, and others have

    def _begin(self, steps: list[ExchangeStep | Agreement]) -> None:
        """Go on with ``steps``, of all ranks."""
        me = self._world.rank
        self._all = steps
        # Where the next step of this rank is among all.
        self._at = 0
        extents = [e.extent for e in steps if isinstance(e, ExchangeStep) and e.server == me]
        # The first of them is being read already, wherever one is.
        self._extents = iter(extents[self._ahead is not None :])

    def __enter__(self) -> ExchangeReader:
        """Begin, with all others. From here on they wait for this rank, which fails at a step."""
        with DeferredSignals() as signals:
            # Collective: whoever failed before is told of here, before anybody waits for a message.
            self._world.raise_together(None, "beginning to exchange")
            try:
                self._reader.__enter__()
                # The first extent is read while this rank may still be receiving.
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
        with DeferredSignals() as signals:
            try:
                # Where a rank has gone no step can be run any more: the others notice by themselves.
                if error is None or agreed_since(error, self._entered) is None:
                    # This rank's messages still go out, with whatever content: others have settled how many
                    # they wait for.
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
        with DeferredSignals() as signals:
            going = self._step()
        signals.deliver()
        return going

    def _step(self) -> bool:
        me = self._world.rank
        # Steps of others are left out; the order of those that stay is that of all ranks, which is what keeps
        # two ranks from waiting for each other.
        while self._at < len(self._all) and not self._concerns(self._all[self._at]):
            self._at += 1
        if self._at == len(self._all):
            return False
        step = self._all[self._at]
        self._at += 1
        if isinstance(step, Agreement):
            self._agree()
        elif step.server == me:
            self._serve(step, self._fetched(step.nbytes))
        elif (sender := self._routes.sender(step, self._routes.machines.names[me])) == me:
            extent = self._passing[: step.nbytes]
            self._receive(extent, step.server)
            self._serve(step, extent)
        else:
            # Exactly one: a step has one message for each rank that wants something of it.
            (own,) = (want for want in step.wants if want.table == self._table)
            self._receive(self._message[: own.nbytes], sender)
            self._left = bytes_view(self._message)[: own.nbytes]
        return True

    def _concerns(self, step: ExchangeStep | Agreement) -> bool:
        if isinstance(step, Agreement) or step.server == self._world.rank:
            return True
        return any(want.table == self._table for want in step.wants)

    def _receive(self, room: torch.Tensor, sender: int) -> None:
        send_or_receive(dist.recv, room, sender, self._world)
        self.received_bytes += len(room)

    def _agree(self) -> None:
        try:
            self._world.raise_together(self._failure, "exchanging what was read")
            told = self._world.all_gather_object(self._interval.told(), "telling how fast ranks read")
        except BaseException:
            self._all = []  # all have stopped here
            self._at = 0
            raise
        speeds = [speed for speed, _ in told]
        # Where nobody has read for long a rank's speed is a matter of chance.
        slow = slow_ranks(speeds) if max(seconds for _, seconds in told) >= TELLING_SECONDS else set()
        if slow:
            left = self._all[self._at :]
            changed = reassigned(left, speeds, self._routes.tables)
            mine, now = (_served(steps, self._world.rank) for steps in (left, changed))
            # Others too have extents in exchange for some of theirs, which is nothing to tell.
            if self._world.rank in slow:
                self.given_bytes += sum(mine[extent] for extent in mine.keys() - now.keys())
            self.planned_bytes += sum(now.values()) - sum(mine.values())
            self._begin(changed)
            if self._ahead is None:
                self._fetch()
        self._interval = _Measured()

    def _serve(self, step: ExchangeStep, extent: torch.Tensor) -> None:
        """Send to each what it asked for; a failure is kept, and the message sent all the same.

        First the whole extent to those that pass it on. The next ranks come first. With servers that follow
        each other in a list of steps, each then passes on what it has while the one before is still sending.
        This rank's own bytes come last: they stay in the message until the caller has taken them.
        """
        me, size = self._world.rank, self._world.size

        def turn(rank: int) -> int:
            return (rank - me - 1) % size

        for relay in sorted(self._routes.relays(step) if step.server == me else (), key=turn):
            send_or_receive(dist.send, extent, relay, self._world)
        reader = MemoryReader([extent])
        receivers = [(want, sorted(to, key=turn)) for want, to in self._routes.receivers(step, me) if to]
        receivers.sort(key=lambda each: (each[0].table == self._table, turn(each[1][0])))
        for want, to in receivers:
            room = self._message[: want.nbytes]
            try:
                if self._failure is None:
                    requests = self._routes.tables.different[want.table][want.first : want.stop]
                    pack(bytes_view(room), requests, reader, step.extent[1])
            except BaseException as error:
                self._failure = error
            # Sent in any case, whole, after a failure too: the receiver waits for so many bytes, and hears of
            # the failure at the next agreement.
            for rank in to:
                if rank != me:
                    send_or_receive(dist.send, room, rank, self._world)
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
        # What was read into the other room has been sent: its step came before this one.
        self._rooms.reverse()
        part = part_of(end - begin, self._threads)

        def read(at: int) -> float:
            self._reader.read(file, begin + at, [bytes_view(room)[at : at + part]])
            return time.perf_counter()

        parts = [self._pool.submit(read, at) for at in range(0, end - begin, part)]
        self._ahead = room, parts, time.perf_counter()

    def _fetched(self, nbytes: int) -> torch.Tensor:
        """The extent that is being read, of so many bytes; the one after it is asked for.

        Where it cannot be read that is kept, and the messages still go out, of whatever lies in the room.
        """
        if self._failure is not None or self._ahead is None:
            return self._rooms[0][:nbytes]
        room, parts, begun = self._ahead
        for part in parts:
            failure = part.exception()
            # The first failure is the one that is told; all parts are waited for, since they write into the
            # room.
            self._failure = self._failure or failure
        self.read_bytes += len(room)
        if self._failure is None:
            seconds = max((part.result() for part in parts), default=begun) - begun
            for measured in (self._interval, self.measured):
                measured.add(len(room), seconds)
            self._fetch()
        return room


class _Measured:
    """What a rank has read, and how long it took."""

    def __init__(self) -> None:
        self.nbytes, self.seconds = 0, 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        """So many bytes more, read in so many seconds."""
        self.nbytes += nbytes
        self.seconds += seconds

    def told(self) -> tuple[float, float]:
        """Bytes a second (0 where nothing was read), and seconds."""
        return (self.nbytes / max(self.seconds, 1e-6) if self.nbytes else 0.0), self.seconds


def _served(steps: Sequence[ExchangeStep | Agreement], rank: int) -> dict[tuple[int, int, int, int], int]:
    """Bytes of the extents that ``rank`` reads, each by its step's number and place."""
    return {
        (number, *step.extent): step.nbytes
        for number, step in enumerate(steps)
        if isinstance(step, ExchangeStep) and step.server == rank
    }


def _room(sizes: Any) -> torch.Tensor:
    return torch.empty(max(sizes, default=0), dtype=torch.uint8, device="cpu")


#: Requests and bytes of all ranks together in one round. A list takes 40 bytes a request.
ROUND_REQUESTS, ROUND_BYTES = 1 << 16, 1 << 30
_BEGIN, _DURING = "beginning to read from the mapping", "reading from the mapping"


class MappingReader(Reader):
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
        self._entered = now()
        self.received_bytes = 0

    def __enter__(self) -> MappingReader:
        """Begin, with all others. From here on the holder waits for this rank, which fails when it reads."""
        with DeferredSignals() as signals:
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
        if error is not None and agreed_since(error, self._entered) is not None:
            return
        with DeferredSignals() as signals:
            while not self._ended and self._receive():
                pass
            failed = error is not None or self._failure is not None
            if not self._ended:
                # No requests: the holder takes this rank off its list, and tells the others if it has failed.
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
            with DeferredSignals() as signals:
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
        # An equal share of the round for each rank that is served, whether or not it still wants something:
        # that bounds what the holder keeps, and needs no word between the ranks.
        sizes = self._table[first : first + max(1, ROUND_REQUESTS // self._ranks), 2]
        # At least one request, be it larger than the share: else there would be no end.
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
            # The rank that failed is in the same call, with its error; the holder and all that were served as
            # well.
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
    with DeferredSignals() as signals:
        world.raise_together(None, _BEGIN)
        while left:
            # 1. Every rank that is left says how it is and what it wants next; one that wants nothing is left
            # out.
            lists, failed = _lists(left, world)
            try:
                signals.deliver()
            except BaseException as interrupt:
                failure = interrupt
            left, stop = list(lists), failed or failure is not None
            for rank in left:
                # 2. Each hears whether the round takes place.
                answer = torch.tensor([int(stop)], device="cpu")
                send_or_receive(dist.send, answer, rank, world)
            if stop:
                world.raise_together(failure, _DURING)
            # 3. The bytes, a message to each in turn. A failure here is told in the next round.
            for rank, table, nbytes in _messages(lists, len(room)):
                try:
                    if failure is None:
                        pack(bytes_view(room[:nbytes]), table, reader)
                except BaseException as error:
                    failure = error
                send_or_receive(dist.send, room[:nbytes], rank, world)
                sent += nbytes
    # Nobody waits for this rank any more: the phase around the transfer tells the others.
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
    # The receiver groups its list by the same `batches` and the same room: so both know every length.
    turns = {rank: batches(table[:, 2].tolist(), limit) for rank, table in lists.items()}
    while turns:
        for rank in list(turns):
            batch = next(turns[rank], None)
            if batch is None:
                del turns[rank]
            else:
                first, stop, nbytes = batch
                yield rank, lists[rank][first:stop], nbytes


def send_or_receive(call: Callable[..., object], tensor: torch.Tensor, peer: int, world: World) -> None:
    """One message to or from a peer: ``call`` is ``dist.send`` or ``dist.recv``. Raises PeerError."""
    try:
        call(tensor, peer, group=world.group)
    except (RuntimeError, dist.DistBackendError) as error:
        raise beyond_telling(
            PeerError(
                f"rank {peer} died or stopped answering while rank {world.rank} exchanged the checkpoint's "
                "bytes with it; nothing was loaded: start all ranks again"
            )
        ) from error


def pack(view: memoryview, requests: Table, reader: Reader, begin: int | None = None) -> None:
    """Put the bytes of ``requests``, one after the other, into ``view``.

    With ``begin`` the reader's only source is the part of the file that begins there.
    """
    at = 0
    for file, offset, nbytes, count, stride in requests.tolist():
        place = view[at : at + nbytes]
        if begin is not None:
            file, offset = 0, offset - begin
        if count == 1:
            reader.read(file, offset, [place])
        else:
            width = nbytes // count
            reader.gather(file, offset, Rows(count, width, stride), place, width)
        at += nbytes


def place_rows(data: memoryview, rows: Rows, target: memoryview, step: int) -> memoryview:
    """Put the rows that ``data`` begins with into ``target``, ``step`` bytes apart; the rest of ``data``."""
    nbytes = rows.count * rows.width
    source = torch.frombuffer(data, dtype=torch.uint8)[:nbytes].view(rows.count, rows.width)
    torch.frombuffer(target, dtype=torch.uint8).as_strided((rows.count, rows.width), (step, 1)).copy_(source)
    return data[nbytes:]
