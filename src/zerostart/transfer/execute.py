"""Run a plan: threads that take reads in order, and put the bytes where the plan says."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import torch

from zerostart.planning import Computation, Destination, Part, Plan, Read
from zerostart.transfer.copying import copy_strided
from zerostart.transfer.progress import Progress
from zerostart.transfer.reader import FileReader, MemoryReader, Reader
from zerostart.transfer.rows import Rows

__all__ = ["bytes_view", "execute", "reader_threads"]


def execute(
    plan: Plan,
    storages: Sequence[torch.Tensor],
    progress: Progress,
    threads: int | None = None,
    reader: Reader | None = None,
) -> int:
    """Fill ``storages`` (1-D, one for each of the plan's destinations) and zero their padding.

    Returns the bytes read. ``reader`` replaces the one that the plan calls for, of its files or its memory.
    The first error of any thread stops the others and is raised here; the storages are then partly filled
    and of no use.
    """
    _zero_padding(plan.destinations, storages)
    threads = min(threads or reader_threads(), max(1, len(plan.reads) + len(plan.computations)))
    with reader or _reader(plan) as source, progress:
        pool = _Pool(plan, storages, source, progress)
        workers = [
            threading.Thread(target=pool.work, name=f"zerostart-reader-{i}", daemon=True)
            for i in range(threads - 1)
        ]
        for worker in workers:
            worker.start()
        pool.work()
        for worker in workers:
            worker.join()
        if pool.error is not None:
            raise pool.error
    return progress.done


def _reader(plan: Plan) -> Reader:
    return FileReader(plan.files, plan.sizes) if plan.memory is None else MemoryReader(plan.memory.buffers)


def reader_threads() -> int:
    """At least two: one copies from the page cache while the other sets up its read."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)
    return max(2, min(8, cores // max(1, local_ranks)))


def _zero_padding(destinations: Sequence[Destination], storages: Sequence[torch.Tensor]) -> None:
    for destination, storage in zip(destinations, storages, strict=True):
        if destination.owned < destination.numel:
            storage[destination.owned :].zero_()


def bytes_view(tensor: torch.Tensor) -> memoryview:
    """A writable view of a contiguous host tensor's bytes."""
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)


class _Pool:
    """State that the reading threads share."""

    def __init__(
        self, plan: Plan, storages: Sequence[torch.Tensor], reader: Reader, progress: Progress
    ) -> None:
        self.error: BaseException | None = None
        self._plan = plan
        self._targets = _Targets(plan.destinations, storages)
        self._pinned = any(storage.device.type != "cpu" for storage in storages)
        self._reader = reader
        self._progress = progress
        self._items = chain[Read | Computation](plan.reads, plan.computations)
        self._lock = threading.Lock()

    def work(self) -> None:
        """Take reads and computations until there are none left or one has failed."""
        try:
            staging = _Staging(self._plan.chunk_size, self._pinned)
            for item in self._taken():
                if isinstance(item, Read):
                    self._read(item, self._targets, staging)
                else:
                    self._compute(item, self._targets, staging)
        except BaseException as error:  # whatever it is, it is raised again in the calling thread
            self.error = self.error or error

    def _taken(self) -> Iterator[Read | Computation]:
        while self.error is None:
            with self._lock:
                item = next(self._items, None)
            if item is None:
                return
            yield item

    def _read(self, read: Read, targets: _Targets, staging: _Staging) -> None:
        if read.direct:
            self._into_place(read, targets)
        else:
            self._into(staging.view(read.nbytes), read)
            for part in read.parts:
                deliver(part, staging.buffer, targets.storages[part.target])
        self._progress.advance(read.nbytes)

    def _into(self, buffer: memoryview, read: Read) -> None:
        if read.rows == 1:
            self._reader.read(read.file, read.offset, [buffer])
        else:
            rows = _rows(read)
            self._reader.gather(read.file, read.offset, rows, buffer, rows.width)

    def _into_place(self, read: Read, targets: _Targets) -> None:
        if read.rows == 1:
            self._reader.read(read.file, read.offset, [targets.place(part) for part in read.parts])
            return
        (part,) = read.parts
        rows, step = _rows(read), part.loops[0][2] * part.dtype.itemsize
        place = targets.place(part, (rows.count - 1) * step + rows.width)
        self._reader.gather(read.file, read.offset, rows, place, step)

    def _compute(self, computation: Computation, targets: _Targets, staging: _Staging) -> None:
        """Fill the registers, run the steps, and deliver the last one's result to ``targets``."""
        rows = [torch.empty(r.numel, dtype=r.dtype) for r in computation.registers]
        registers = _Targets(computation.registers, rows)
        for read in computation.reads:
            self._read(read, registers, staging)
        for step in computation.steps:
            operands = [rows[number].view(extent) for number, extent in step.operands]
            made = step.source.evaluate(operands, step.box, step.factors).contiguous()
            # Not ``view(-1)``: a dimension of size 1 may have kept a stride of 0.
            result = made.as_strided((made.numel(),), (1,)).view(torch.uint8)
            to = targets if step is computation.steps[-1] else registers
            for part in step.parts:
                deliver(part, result, to.storages[part.target])


class _Targets:
    """Storages that reads go to, with the bytes of those that they may land in."""

    def __init__(self, destinations: Sequence[Destination], storages: Sequence[torch.Tensor]) -> None:
        self.storages = storages
        self._views = [
            bytes_view(storage) if destination.direct and storage.numel() else None
            for destination, storage in zip(destinations, storages, strict=True)
        ]

    def place(self, part: Part, nbytes: int | None = None) -> memoryview:
        """Where the bytes of a direct part belong; ``nbytes`` of them if they are rows with gaps between."""
        view = self._views[part.target]
        assert view is not None, "a direct part has host storage"
        begin = part.to * part.dtype.itemsize
        return view[begin : begin + (part.nbytes if nbytes is None else nbytes)]


def _rows(read: Read) -> Rows:
    return Rows(read.rows, read.nbytes // read.rows, read.stride)


class _Staging:
    """One thread's staging buffer, allocated when it is needed: pinned where a device copies out of it."""

    def __init__(self, nbytes: int, pinned: bool) -> None:
        self._nbytes = nbytes
        self._pinned = pinned

    @cached_property
    def buffer(self) -> torch.Tensor:
        """The buffer's bytes."""
        return torch.empty(self._nbytes, dtype=torch.uint8, pin_memory=self._pinned)

    def view(self, nbytes: int) -> memoryview:
        """Its first bytes, to be read into."""
        return bytes_view(self.buffer)[:nbytes]


def deliver(part: Part, data: torch.Tensor, storage: torch.Tensor) -> None:
    """Copy, permute and cast one part of the bytes ``data`` to its destination."""
    width = part.dtype.itemsize
    raw = data[part.at : part.at + part.nbytes]
    if (data.storage_offset() + part.at) % width:
        # A tensor of a coalesced read may begin at an offset that its dtype cannot be viewed at.
        raw = raw.clone()
    copy_strided(storage, part.to, raw.view(part.dtype), part.loops)
