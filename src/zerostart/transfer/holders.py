"""Reads from a mapping of tensors that other ranks hold.

The first holder serves the ranks that hold nothing, in rounds. In a round some ranks send the list of their
next requests, and get their bytes in the order of that list. All ranks meet in each round, so that a failure
of any of them ends the reading of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import numpy as np
import torch

from zerostart.checkpoint.storage import Reader, Rows
from zerostart.distributed.world import World
from zerostart.transfer.planning import Read, batches
from zerostart.transfer.staging import bytes_view

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
        """Read the requests of one list, one behind the other."""
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
