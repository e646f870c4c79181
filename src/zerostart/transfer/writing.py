"""Run a plan of writes: threads collect elements in memory and write them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from zerostart.checkpoint.storage.direct import PAGE
from zerostart.geometry import is_one_run
from zerostart.recipe import one_thread
from zerostart.transfer.buffers import page_locked, release_locked
from zerostart.transfer.execute import Crew
from zerostart.transfer.planning.writes import Write, WritePlan
from zerostart.transfer.staging import copy_strided, use_stream, view_bytes

#: Room next to a chunk in a staging buffer, so that both can start anywhere in a page.
SLACK = 2 * PAGE
#: Receives each written block: tensor name, first element, distance of rows, and rows [rows, elements]
#: in the file's dtype. It runs in several threads under the stream that fills the rows, and must not keep
#: them. They are on the accelerator if they come from there.
OnWrite = Callable[[str, int, int, torch.Tensor], None]
#: Returns the elements to write, from the first element's number and the stored elements.
Change = Callable[[int, torch.Tensor], torch.Tensor]


class Writer(Protocol):
    """Target of a plan's writes: files, or other processes' memory.

    Several threads share it.
    """

    def lead(self, name: str, offset: int) -> int:
        """Return the best offset in a page for a tensor's byte."""
        ...

    def goes_round(self, nbytes: int) -> bool:
        """Return True for writes that bypass the page cache."""
        ...

    def write_rows(self, name: str, data: memoryview, offset: int, length: int, step: int, rows: int) -> None:
        """Write rows that are ``step`` bytes apart in ``data`` and tensor.

        Each has ``length`` bytes; the first goes to byte ``offset`` of tensor ``name``. ``data`` must not be
        kept.
        """
        ...


@dataclass(frozen=True)
class Source:
    """A 1-D storage, and an optional change of written elements."""

    storage: torch.Tensor
    change: Change | None = None

    def elements(self, first: int, count: int) -> torch.Tensor:
        """Return ``count`` elements from ``first`` on, changed."""
        elements = self.storage[first : first + count]
        return elements if self.change is None else self.change(first, elements)


def write_out(
    plan: WritePlan,
    storages: Sequence[Source],
    writer: Writer | None,
    threads: int = 2,
    on_write: OnWrite | None = None,
) -> int:
    """Write ``storages``, one per origin; return the bytes.

    Without a ``writer`` only ``on_write`` is called. A thread takes a buffer of ``chunk_size`` and ``SLACK``,
    and one of ``chunk_size`` on an accelerator. The first error of a thread stops the others and is raised
    here.
    """
    devices = dict.fromkeys(s.storage.device for s in storages if s.storage.device.type != "cpu")
    for each in devices:
        # The threads' streams do not wait for computations on other streams.
        torch.accelerator.synchronize(each)
    device = next(iter(devices), None)
    writing = _Writing(plan, storages, writer, on_write, device)
    # There are enough writing threads to use all processors.
    with one_thread():
        crew = Crew(plan.writes, writing.work, device, "zerostart-writer")
        crew.run(min(threads, max(1, len(plan.writes))))
    del crew
    release_locked()  # its threads' buffers
    return plan.nbytes


@dataclass(frozen=True)
class _Writing:
    plan: WritePlan
    storages: Sequence[Source]
    writer: Writer | None
    on_write: OnWrite | None
    device: torch.device | None

    def work(self, writes: Iterator[Write]) -> None:
        with torch.no_grad(), use_stream(self.device or torch.device("cpu")) as stream:
            room = _Room(self.plan.chunk_size, self.device, stream)
            try:
                for write in writes:
                    self._write(write, room)
            finally:
                # Copies and callbacks may still use the buffers.
                room.wait()

    def _write(self, write: Write, room: _Room) -> None:
        stores = {self.storages[part.target].storage.device for part in write.parts}
        on_device = self.device is not None and stores == {self.device}
        if on_device:
            # The accelerator collects, casts and sums: fewer bytes to copy, and less work for the host.
            data = self._collect_on_device(write, room)
            report_rows(write, data, self.on_write)
            if self.writer is None:
                return
            lead = self.writer.lead(write.name, write.first * write.dtype.itemsize)
            data = room.fetch(data, lead)
        else:
            data = self._collect(write, room)
        view, width = view_bytes(data), write.dtype.itemsize
        for first, count, step, rows in write.rows():
            if self.writer is not None:
                span = view[first * width : (first + (rows - 1) * step + count) * width]
                place = (write.first + first) * width
                self.writer.write_rows(write.name, span, place, count * width, step * width, rows)
        if not on_device:
            report_rows(write, data, self.on_write)

    def _collect_on_device(self, write: Write, room: _Room) -> torch.Tensor:
        if len(write.parts) == 1 and write.count == write.span and is_one_run(write.parts[0].loops):
            (part,) = write.parts
            elements = self.storages[part.target].elements(part.to, write.count)
            if elements.dtype == write.dtype:
                return elements
            return room.device_elements(write.span, write.dtype).copy_(elements)
        data = room.device_elements(write.span, write.dtype)
        gather_parts(write, self.storages, data)
        return data

    def _collect(self, write: Write, room: _Room) -> torch.Tensor:
        lead = 0
        if self.writer is not None:
            lead = self.writer.lead(write.name, write.first * write.dtype.itemsize)
        if write.direct:
            (part,) = write.parts
            data = self.storages[part.target].elements(part.to, write.count)
            # Written from its place, unless the page cache is bypassed, which needs aligned memory.
            if self.writer is None or not self.writer.goes_round(data.nbytes):
                return data
            return room.elements(write.span, write.dtype, lead).copy_(data)
        data = room.elements(write.span, write.dtype, lead)
        gather_parts(write, self.storages, data)
        return data


def gather_parts(write: Write, storages: Sequence[Source], data: torch.Tensor) -> None:
    """Copy the elements of ``write`` from ``storages`` into its window ``data``."""
    for part in write.parts:
        # A write is a reversed read: the storage is the source, the window in the file the target.
        loops = [(size, local, far) for size, far, local in part.loops]
        at = part.at // part.dtype.itemsize
        count = 1 + sum((size - 1) * local for size, local, _ in loops)
        copy_strided(data, at, storages[part.target].elements(part.to, count), loops)


def report_rows(write: Write, data: torch.Tensor, on_write: OnWrite | None) -> None:
    """Call ``on_write`` with each group of rows of ``write`` in its window ``data``."""
    if on_write is None:
        return
    for first, count, step, rows in write.rows():
        row_elements = data.as_strided((rows, count), (step, 1), int(data.storage_offset()) + first)
        on_write(write.name, write.first + first, step, row_elements)


class _Room:
    """One thread's buffers on the host and on the accelerator."""

    def __init__(self, nbytes: int, device: torch.device | None, stream: torch.Stream | None) -> None:
        self._nbytes = nbytes
        self._device = device
        self._stream = stream

    @cached_property
    def _buffer(self) -> torch.Tensor:
        nbytes = self._nbytes + SLACK
        pinned = self._device is not None
        room = page_locked(nbytes) if pinned else torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return room[-room.data_ptr() % PAGE :]

    @cached_property
    def _device_buffer(self) -> torch.Tensor:
        return torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)

    def elements(self, count: int, dtype: torch.dtype, lead: int) -> torch.Tensor:
        """Return room, ``lead`` bytes after the start of a page."""
        begin = lead - lead % dtype.itemsize
        return self._buffer[begin : begin + count * dtype.itemsize].view(dtype)

    def device_elements(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return room for ``count`` elements on the accelerator."""
        return self._device_buffer[: count * dtype.itemsize].view(dtype)

    def fetch(self, data: torch.Tensor, lead: int) -> torch.Tensor:
        """Copy ``data`` from the accelerator and wait for it."""
        copied = self.elements(data.numel(), data.dtype, lead)
        copied.copy_(data, non_blocking=self._stream is not None)
        self.wait()
        return copied

    def wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
