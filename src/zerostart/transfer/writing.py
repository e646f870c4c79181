"""Run a plan of writes: threads that take writes in order, put them together in memory, and write them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import torch

from zerostart.checkpoint.writer import CheckpointWriter
from zerostart.planning.writes import Write, WritePlan
from zerostart.transfer.copying import copy_strided
from zerostart.transfer.staging import bytes_view

__all__ = ["Noted", "write_out"]

#: Told of every run that is written: the tensor, its first element there, and the elements, in the file's
#: dtype, which it must not keep. Called from several threads.
Noted = Callable[[str, int, torch.Tensor], None]


def write_out(
    plan: WritePlan,
    storages: Sequence[torch.Tensor],
    writer: CheckpointWriter,
    threads: int = 2,
    noted: Noted | None = None,
) -> int:
    """Write what ``storages`` (1-D, one for each of the plan's origins) hold; returns the bytes written.

    Beside the storages this takes a buffer of the plan's ``chunk_size`` for each thread. The first error of
    any thread stops the others and is raised here.
    """
    device = next((storage.device for storage in storages if storage.device.type != "cpu"), None)
    if device is not None:
        # What was computed last may still be under way, on a stream that the threads know nothing of.
        torch.accelerator.synchronize(device)
    crew = _Crew(plan, storages, writer, noted, device)
    crew.run(min(threads, max(1, len(plan.writes))) - 1)
    if crew.error is not None:
        raise crew.error
    return plan.nbytes


class _Crew:
    """State that the writing threads share."""

    def __init__(
        self,
        plan: WritePlan,
        storages: Sequence[torch.Tensor],
        writer: CheckpointWriter,
        noted: Noted | None,
        device: torch.device | None,
    ) -> None:
        self.error: BaseException | None = None
        self._plan = plan
        self._storages = storages
        self._writer = writer
        self._noted = noted
        self._device = device
        self._writes = iter(plan.writes)
        self._lock = threading.Lock()

    def run(self, beside: int) -> None:
        """``work``, in this thread and in others ``beside`` it, until all have ended."""
        started: list[threading.Thread] = []
        try:
            for number in range(beside):
                worker = threading.Thread(
                    target=self._work_beside, name=f"zerostart-writer-{number}", daemon=True
                )
                worker.start()
                started.append(worker)
            self._work()
        except BaseException as error:  # an interrupt: what the others write to is closed after they end
            self.error = self.error or error
        for worker in started:
            worker.join()

    def _work_beside(self) -> None:
        if self._device is not None and self._device.index is not None:
            torch.accelerator.set_device_index(self._device.index)
        self._work()

    def _work(self) -> None:
        try:
            room = _Room(self._plan.chunk_size, self._device is not None)
            for write in self._taken():
                self._write(write, room)
        except BaseException as error:  # whatever it is, it is raised again in the calling thread
            self.error = self.error or error

    def _taken(self) -> Iterator[Write]:
        while self.error is None:
            with self._lock:
                write = next(self._writes, None)
            if write is None:
                return
            yield write

    def _write(self, write: Write, room: _Room) -> None:
        data = self._in_place(write) if write.direct else self._put_together(write, room)
        view, width = bytes_view(data), write.dtype.itemsize
        for first, count in write.runs():
            if self._noted is not None:
                self._noted(write.name, write.first + first, data[first : first + count])
            run = view[first * width : (first + count) * width]
            self._writer.write(write.name, run, (write.first + first) * width)

    def _in_place(self, write: Write) -> torch.Tensor:
        (part,) = write.parts
        return self._storages[part.target][part.to : part.to + write.count]

    def _put_together(self, write: Write, room: _Room) -> torch.Tensor:
        data = room.elements(write.span, write.dtype)
        with torch.no_grad():
            for part in write.parts:
                loops = [(size, local, far) for size, far, local in part.loops]
                at = part.at // part.dtype.itemsize
                copy_strided(data, at, self._storages[part.target][part.to :], loops)
        return data


class _Room:
    """One thread's staging buffer, made when it is first needed; pinned where an accelerator fills it."""

    def __init__(self, nbytes: int, pinned: bool) -> None:
        self._nbytes = nbytes
        self._pinned = pinned

    @cached_property
    def _buffer(self) -> torch.Tensor:
        return torch.empty(self._nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)

    def elements(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Room for ``count`` elements of ``dtype``."""
        return self._buffer[: count * dtype.itemsize].view(dtype)
