"""Run a plan of writes: threads that take writes in order, put them together in memory, and write them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from zerostart.checkpoint.storage.direct import PAGE
from zerostart.recipe import one_thread
from zerostart.transfer.buffers import page_locked, release_locked
from zerostart.transfer.execute import Crew
from zerostart.transfer.planning.writes import Write, WritePlan
from zerostart.transfer.staging import bytes_view, copy_strided

#: Bytes of a staging buffer beside a chunk, so that it can lie in its pages as the chunk does in the file's.
SLACK = 2 * PAGE
#: Told of all that is written: the tensor, the first element there, the distance from row to row, and rows of
#: elements in the file's dtype, [rows, elements], which it must not keep. Called from several threads.
Noted = Callable[[str, int, int, torch.Tensor], None]
#: Given the first element and elements of a storage from there on, gives what is written in their place.
Change = Callable[[int, torch.Tensor], torch.Tensor]


class Writer(Protocol):
    """Where a plan's writes go: files (``CheckpointWriter``), or others' memory. Several threads share it."""

    def lead(self, name: str, offset: int) -> int:
        """Where in a page of memory byte ``offset`` of tensor ``name`` best lies."""
        ...

    def goes_round(self, nbytes: int) -> bool:
        """Whether it wants a write of so many bytes in memory that lies as ``lead`` says."""
        ...

    def write_rows(self, name: str, data: memoryview, offset: int, length: int, step: int, rows: int) -> None:
        """Take ``rows`` of ``length`` bytes, ``step`` bytes apart in ``data`` and in tensor ``name``.

        The first goes to byte ``offset`` of it. ``data`` must not be kept.
        """
        ...


@dataclass(frozen=True)
class Source:
    """A 1-D storage, and what changes its elements on their way out."""

    storage: torch.Tensor
    change: Change | None = None

    def elements(self, first: int, count: int) -> torch.Tensor:
        """``count`` elements from ``first`` on, as they are to be written."""
        held = self.storage[first : first + count]
        return held if self.change is None else self.change(first, held)


def write_out(
    plan: WritePlan,
    storages: Sequence[Source],
    writer: Writer | None,
    threads: int = 2,
    noted: Noted | None = None,
) -> int:
    """Write what ``storages`` (one for each of the plan's origins) hold; returns the bytes written.

    Without a ``writer`` nothing is written, and ``noted`` alone is told of what would be.
    Beside the storages this takes a buffer of the plan's ``chunk_size`` and ``SLACK`` for each thread. The
    first error of any thread stops the others and is raised here.
    """
    device = next((s.storage.device for s in storages if s.storage.device.type != "cpu"), None)
    if device is not None:
        # What was computed last may still be under way, on a stream that the threads know nothing of.
        torch.accelerator.synchronize(device)
    writing = _Writing(plan, storages, writer, noted, device)
    # Operators on one thread each: those that write are as many as there is work for.
    with one_thread():
        crew = Crew(plan.writes, writing.work, device, "zerostart-writer")
        crew.run(min(threads, max(1, len(plan.writes))))
    del crew
    release_locked()  # its threads' buffers
    return plan.nbytes


class _Writing:
    """What the writing threads share."""

    def __init__(
        self,
        plan: WritePlan,
        storages: Sequence[Source],
        writer: Writer | None,
        noted: Noted | None,
        device: torch.device | None,
    ) -> None:
        self._plan = plan
        self._storages = storages
        self._writer = writer
        self._noted = noted
        self._device = device

    def work(self, writes: Iterator[Write]) -> None:
        """Make writes, one after the other."""
        room = _Room(self._plan.chunk_size, self._device is not None)
        for write in writes:
            self._write(write, room)

    def _write(self, write: Write, room: _Room) -> None:
        if self._writer is None and self._noted is not None and self._note_in_place(write):
            return
        data = self._data(write, room)
        view, width = bytes_view(data), write.dtype.itemsize
        for first, count, step, rows in write.rows():
            if self._writer is not None:
                span = view[first * width : (first + (rows - 1) * step + count) * width]
                place = (write.first + first) * width
                self._writer.write_rows(write.name, span, place, count * width, step * width, rows)
            if self._noted is not None:
                # Rows as they are in the file, gaps left out, and without a copy.
                seen = data.as_strided((rows, count), (step, 1), int(data.storage_offset()) + first)
                self._noted(write.name, write.first + first, step, seen)

    def _note_in_place(self, write: Write) -> bool:
        """Tell of rows from where they lie in storages of the host; False if that is not what they are."""
        found = []
        for part in write.parts:
            source, loops = self._storages[part.target], [*part.loops]
            held = source.storage
            inner = loops.pop()[0] if loops and loops[-1][1:] == (1, 1) else 1
            rows, far, local = loops.pop() if loops else (1, inner, inner)
            if loops or local < inner or source.change is not None:
                return False
            if held.dtype != write.dtype or held.device.type != "cpu":
                return False
            seen = held.as_strided((rows, inner), (local, 1), int(held.storage_offset()) + part.to)
            found.append((write.first + part.at // write.dtype.itemsize, far, seen))
        assert self._noted is not None, "asked for"
        for first, step, seen in found:
            self._noted(write.name, first, step, seen)
        return True

    def _data(self, write: Write, room: _Room) -> torch.Tensor:
        """What is written, where it lies or in ``room``, in its page of memory as in its page of the file."""
        lead = 0
        if self._writer is not None:
            lead = self._writer.lead(write.name, write.first * write.dtype.itemsize)
        if write.direct:
            (part,) = write.parts
            data = self._storages[part.target].elements(part.to, write.count)
            # Written, or summed, from where it lies. What goes round the page cache has to lie in its page of
            # memory as in its page of the file, which only ``room`` sees to.
            if self._writer is None or not self._writer.goes_round(data.nbytes):
                return data
            return room.elements(write.span, write.dtype, lead).copy_(data)
        data = room.elements(write.span, write.dtype, lead)
        with torch.no_grad():
            for part in write.parts:
                # A write is a read run backwards: the storage is the source here, the file's window the
                # destination.
                loops = [(size, local, far) for size, far, local in part.loops]
                at = part.at // part.dtype.itemsize
                count = 1 + sum((size - 1) * local for size, local, _ in loops)
                copy_strided(data, at, self._storages[part.target].elements(part.to, count), loops)
        return data


class _Room:
    """One thread's staging buffer, made when it is first needed; pinned where an accelerator fills it."""

    def __init__(self, nbytes: int, pinned: bool) -> None:
        self._nbytes = nbytes
        self._pinned = pinned

    @cached_property
    def _buffer(self) -> torch.Tensor:
        """From the beginning of a page on."""
        nbytes = self._nbytes + SLACK
        room = page_locked(nbytes) if self._pinned else torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return room[-room.data_ptr() % PAGE :]

    def elements(self, count: int, dtype: torch.dtype, lead: int) -> torch.Tensor:
        """Room for ``count`` elements of ``dtype``, ``lead`` bytes after the beginning of a page."""
        begin = lead - lead % dtype.itemsize
        return self._buffer[begin : begin + count * dtype.itemsize].view(dtype)
