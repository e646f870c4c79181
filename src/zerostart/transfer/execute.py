"""Run a plan: threads take reads in order and put the bytes into place."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from zerostart.checkpoint.storage import Reader, Rows
from zerostart.recipe import one_thread
from zerostart.transfer.planning import Computation, Destination, Part, Plan, Read
from zerostart.transfer.staging import HostStaging, make_staging, view_bytes

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

#: Seconds between two meetings of reading ranks.
MEETING_SECONDS = 0.5


def execute(
    plan: Plan,
    storages: Sequence[torch.Tensor],
    progress: Progress,
    threads: int | None = None,
    reader: Reader | None = None,
    depth: int = 2,
    meet: Callable[[bool], bool] | None = None,
) -> int:
    """Fill 1-D ``storages``, one per destination, and zero their padding.

    Returns the bytes read. ``depth`` is the number of staging buffers of a thread for an accelerator.
    ``meet`` runs in this thread while others read: it receives whether they have ended, and returns whether
    all ranks' threads have. The first error of a thread stops the others and is raised here.
    """
    # More threads than work would only take staging buffers.
    work = max(1, len(plan.reads) + len(plan.computations))
    threads = min(threads or 2, work)
    # The reader first: if other ranks serve it, they have to learn of any failure.
    with reader or plan.storage.reader() as source, progress, one_thread(bool(plan.computations)):
        _zero_padding(plan.destinations, storages)
        devices = dict.fromkeys(storage.device for storage in storages if storage.device.type != "cpu")
        for each in devices:
            # The threads' streams do not wait for the stream that zeroed the padding.
            torch.accelerator.current_stream(each).synchronize()
        device = next(iter(devices), None)
        reading = _Reading(plan, storages, source, progress, device, threads, depth)
        items: list[Read | Computation] = [*plan.reads, *plan.computations]
        Crew(enumerate(items), reading.work, device, "zerostart-reader").run(threads, meet)
    return progress.done


def _zero_padding(destinations: Sequence[Destination], storages: Sequence[torch.Tensor]) -> None:
    for destination, storage in zip(destinations, storages, strict=True):
        # Optimizers and norms run over the padding at the end of a partition, so it must be zero.
        if destination.owned < destination.numel:
            storage[destination.owned :].zero_()


class _Reading:
    def __init__(
        self,
        plan: Plan,
        storages: Sequence[torch.Tensor],
        reader: Reader,
        progress: Progress,
        device: torch.device | None,
        ahead: int,
        depth: int,
    ) -> None:
        self._plan = plan
        self._targets = _Targets(plan.destinations, storages)
        self._device = device
        self._reader = reader
        self._progress = progress
        self._ahead, self._depth = ahead, depth
        # Room for the largest staged read; results of computations use it too.
        staged = (read.nbytes for read in plan.reads if not read.direct)
        self._room = plan.chunk_size if plan.computations else max(staged, default=0)

    def work(self, items: Iterator[tuple[int, Read | Computation]]) -> None:
        # Announce as many reads ahead as there are threads, so that the system can fetch them.
        reads = self._plan.reads
        with make_staging(self._room, self._depth, self._device) as staging:
            for number, item in items:
                # Computations follow all reads, and are not announced.
                if number + self._ahead < len(reads):
                    following = reads[number + self._ahead]
                    self._reader.announce(following.file, following.offset, _rows_of(following))
                if isinstance(item, Read):
                    self._read(item, self._targets, staging)
                else:
                    self._compute(item, self._targets, staging)

    def _read(self, read: Read, targets: _Targets, staging: HostStaging) -> None:
        if read.direct:
            self._read_into_place(read, targets)
        else:
            self._read_into(staging.view(read.nbytes), read)
            staging.deliver(read.parts, targets.storages)
        self._progress.advance(read.nbytes)

    def _read_into(self, buffer: memoryview, read: Read) -> None:
        if read.rows == 1:
            self._reader.read(read.file, read.offset, [buffer])
        else:
            rows = _rows_of(read)
            self._reader.gather(read.file, read.offset, rows, buffer, rows.width)

    def _read_into_place(self, read: Read, targets: _Targets) -> None:
        # One positioned read that scatters: the parts tile it in order.
        if read.rows == 1:
            self._reader.read(read.file, read.offset, [targets.place(part) for part in read.parts])
            return
        # Rows land ``step`` bytes apart; the bytes between belong to other reads. ``place`` ends with the
        # last row, so nothing after it can be written.
        (part,) = read.parts
        rows, step = _rows_of(read), part.loops[0][2] * part.dtype.itemsize
        place = targets.place(part, (rows.count - 1) * step + rows.width)
        self._reader.gather(read.file, read.offset, rows, place, step)

    def _compute(self, computation: Computation, targets: _Targets, staging: HostStaging) -> None:
        rows = [torch.empty(r.numel, dtype=r.dtype, device="cpu") for r in computation.registers]
        _zero_padding(computation.registers, rows)
        registers = _Targets(computation.registers, rows)
        for read in computation.reads:
            self._read(read, registers, staging)
        for step in computation.steps:
            operands = [
                rows[number].view(shape) if strides is None else rows[number].as_strided(shape, strides)
                # Registers are 1-D. Operands get the shape of eager torch, and its strides if the bits depend
                # on them.
                for number, shape, strides in step.operands
            ]
            result = step.source.evaluate(operands, step.box, step.factors).contiguous()
            # Not ``view(-1)``: a dimension of size 1 may have stride 0. Parts take bytes, as from a read.
            result = result.as_strided((result.numel(),), (1,)).view(torch.uint8)
            # Results of earlier steps are operands of later ones, and stay in registers.
            to = targets if step is computation.steps[-1] else registers
            for part in step.parts:
                staging.copy_part(part, result, to.storages[part.target])


class _Targets:
    def __init__(self, destinations: Sequence[Destination], storages: Sequence[torch.Tensor]) -> None:
        self.storages = storages
        self._views = [
            view_bytes(storage) if destination.direct and storage.numel() else None
            for destination, storage in zip(destinations, storages, strict=True)
        ]

    def place(self, part: Part, nbytes: int | None = None) -> memoryview:
        view = self._views[part.target]
        assert view is not None, "a direct part has host storage"
        begin = part.to * part.dtype.itemsize
        return view[begin : begin + (part.nbytes if nbytes is None else nbytes)]


def _rows_of(read: Read) -> Rows:
    return Rows(read.rows, read.nbytes // read.rows, read.stride)


T = TypeVar("T")


class Crew(Generic[T]):
    """Threads that run ``work`` over shared ``items``, in order."""

    def __init__(
        self,
        items: Iterable[T],
        work: Callable[[Iterator[T]], None],
        device: torch.device | None,
        name: str,
    ) -> None:
        self._items = iter(items)
        self._work = work
        self._device = device
        self._name = name
        # Mode of this thread: tensors made in it can only be filled in it.
        self._inference = torch.is_inference_mode_enabled()
        self._lock = threading.Lock()
        self._started: list[threading.Thread] = []
        self._error: BaseException | None = None

    def run(self, threads: int, meet: Callable[[bool], bool] | None = None) -> None:
        """Work in ``threads`` threads; with ``meet``, not in this one.

        Returns when all have ended. The first error stops the others and is raised here.
        """
        extra_threads = threads - (meet is None)
        names = [f"{self._name}-{number}" for number in range(extra_threads)]
        self._started = [threading.Thread(target=self._run_in_thread, name=n, daemon=True) for n in names]
        try:
            for worker in self._started:
                worker.start()
            if meet is None:
                self._take_part()
            else:
                while self._error is None and not meet(self._has_ended(MEETING_SECONDS)):
                    continue
            self._join()
        except BaseException as error:
            # Raised even if a thread failed too: all ranks agreed on the error of ``meet``, and a rank with
            # another error would wait for them in the next meeting.
            self._error = self._error or error
            self._join()
            raise
        if self._error is not None:
            raise self._error

    def _has_ended(self, seconds: float) -> bool:
        """Wait; return True if all threads have ended."""
        until = time.monotonic() + seconds
        for worker in self._started:
            worker.join(max(0.0, until - time.monotonic()))
        return not any(worker.is_alive() for worker in self._started)

    def _join(self) -> None:
        for worker in self._started:
            if worker.ident is not None:  # it was started
                worker.join()

    def _take_part(self) -> None:
        try:
            self._work(self._next_items())
        except BaseException as error:  # raised again in the calling thread
            self._error = self._error or error

    def _run_in_thread(self) -> None:
        if self._device is not None and self._device.index is not None:
            torch.accelerator.set_device_index(self._device.index)
        with torch.inference_mode(self._inference), torch.no_grad():
            self._take_part()

    def _next_items(self) -> Iterator[T]:
        while self._error is None:
            # Only one thread at a time may run a generator.
            with self._lock:
                try:
                    item = next(self._items)
                except StopIteration:
                    return
            yield item


class Progress:
    """Counts bytes; draws a bar if ``shown`` on a terminal."""

    def __init__(self, total: int, shown: bool) -> None:
        self.done = 0
        self._lock = threading.Lock()
        self._bar: Bar | None = None
        if shown and sys.stderr.isatty():
            self._bar = _make_bar()
            self._task = self._bar.add_task("Reading the shard of rank 0", total=total)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, nbytes: int) -> None:
        """Add bytes that a reading thread has read."""
        with self._lock:
            self.done += nbytes
        # Outside the lock, since the bar has its own.
        if self._bar is not None:
            self._bar.advance(self._task, nbytes)


def _make_bar() -> Bar:
    # A slow import that most ranks do not need.
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
    )
