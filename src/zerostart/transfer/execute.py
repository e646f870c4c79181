"""Run a plan: threads that take reads in order, and put the bytes where the plan says."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from zerostart.planning import Destination, Part, Plan, Read
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
    threads = min(threads or reader_threads(), max(1, len(plan.reads)))
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
        self._storages = storages
        self._reader = reader
        self._progress = progress
        self._reads = iter(plan.reads)
        self._lock = threading.Lock()
        self._views = [
            bytes_view(storage) if destination.direct and storage.numel() else None
            for destination, storage in zip(plan.destinations, storages, strict=True)
        ]

    def work(self) -> None:
        """Take reads until there are none left or one has failed."""
        staging: _Staging | None = None
        try:
            for read in self._taken():
                if read.direct:
                    self._into_place(read)
                else:
                    staging = staging or _Staging(self._plan.chunk_size, self._storages)
                    self._into(staging.view, read)
                    for part in read.parts:
                        staging.deliver(part, self._storages[part.target])
                self._progress.advance(read.nbytes)
        except BaseException as error:  # whatever it is, it is raised again in the calling thread
            self.error = self.error or error

    def _taken(self) -> Iterator[Read]:
        while self.error is None:
            with self._lock:
                read = next(self._reads, None)
            if read is None:
                return
            yield read

    def _into(self, buffer: memoryview, read: Read) -> None:
        if read.rows == 1:
            self._reader.read(read.file, read.offset, [buffer[: read.nbytes]])
        else:
            rows = _rows(read)
            self._reader.gather(read.file, read.offset, rows, buffer[: read.nbytes], rows.width)

    def _into_place(self, read: Read) -> None:
        if read.rows == 1:
            self._reader.read(read.file, read.offset, [self._place(part) for part in read.parts])
            return
        (part,) = read.parts
        view = self._views[part.target]
        assert view is not None, "a direct part has host storage"
        rows, step = _rows(read), part.loops[0][2] * part.dtype.itemsize
        begin = part.to * part.dtype.itemsize
        end = begin + (rows.count - 1) * step + rows.width
        self._reader.gather(read.file, read.offset, rows, view[begin:end], step)

    def _place(self, part: Part) -> memoryview:
        view = self._views[part.target]
        assert view is not None, "a direct part has host storage"
        begin = part.to * part.dtype.itemsize
        return view[begin : begin + part.nbytes]


def _rows(read: Read) -> Rows:
    return Rows(read.rows, read.nbytes // read.rows, read.stride)


class _Staging:
    """One thread's staging buffer: pinned where a device copies out of it."""

    def __init__(self, nbytes: int, storages: Sequence[torch.Tensor]) -> None:
        pinned = any(storage.device.type != "cpu" for storage in storages)
        self._buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self.view = bytes_view(self._buffer)

    def deliver(self, part: Part, storage: torch.Tensor) -> None:
        """Copy, permute and cast one part from the buffer to its destination."""
        width = part.dtype.itemsize
        raw = self._buffer[part.at : part.at + part.nbytes]
        if part.at % width:
            # A tensor of a coalesced read may begin at an offset that its dtype cannot be viewed at.
            raw = raw.clone()
        copy_strided(storage, part.to, raw.view(part.dtype), part.loops)
