"""Memory in use and memory free, of the host and of the accelerator, and the peaks of a load."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch

from zerostart.distributed.machine import UNKNOWN, available_memory
from zerostart.transfer.buffers import locked_bytes, release_locked


class PeakMeter:
    """Measures the peaks of anonymous host memory and device memory above the level at the start.

    Host memory is sampled, device memory is the allocator's own mark; where that was higher before, samples.
    None on a device whose allocator counts nothing.
    """

    def __init__(self, device: torch.device, interval: float = 0.01) -> None:
        self.device = device
        self.interval = interval
        self.host_bytes = 0
        #: None: the device's allocator reports no peak.
        self.device_bytes: int | None = 0
        #: Most bytes in use that a sample saw; for peaks below the mark of before.
        self._device_seen = 0
        self._paused = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="zerostart-meter", daemon=True)

    def __enter__(self) -> PeakMeter:
        self._host_before = anonymous_bytes()
        if self.device.type != "cpu":
            self._device_before = allocated_bytes(self.device)
            self._peak_before = peak_bytes(self.device) or 0
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._note()
        if self.device.type != "cpu":
            peak = peak_bytes(self.device)
            if peak is None:
                self.device_bytes = None
            # The mark has risen, so it was reached since; else only the samples know.
            elif peak > self._peak_before:
                self.device_bytes = peak - self._device_before
            else:
                self.device_bytes = max(0, self._device_seen - self._device_before)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what the body adds: importing a library is no part of a load."""
        self._note()
        self._paused = True
        before = anonymous_bytes()
        try:
            yield
        finally:
            self._host_before += max(0, anonymous_bytes() - before)
            self._paused = False

    def _sample(self) -> None:
        while not self._stop.wait(self.interval):
            if not self._paused:
                self._note()

    def _note(self) -> None:
        self.host_bytes = max(self.host_bytes, anonymous_bytes() - self._host_before)
        self._device_seen = max(self._device_seen, allocated_bytes(self.device))


def anonymous_bytes() -> int:
    """Return anonymous resident bytes of this process and page-locked ones; 0 if the system does not say."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024 + locked_bytes()
    return 0


def allocated_bytes(device: torch.device) -> int:
    """Bytes of tensors on an accelerator now; 0 for the host, and where its allocator does not count."""
    return _figure(torch.accelerator.memory_allocated, device) or 0


def peak_bytes(device: torch.device) -> int | None:
    """The most bytes of tensors on an accelerator so far; 0 for the host, None where nothing is counted."""
    return _figure(torch.accelerator.max_memory_allocated, device)


def _figure(figure: Callable[[torch.device], int], device: torch.device) -> int | None:
    if device.type == "cpu":
        return 0
    try:
        return int(figure(device))
    except (RuntimeError, NotImplementedError):  # no allocator of torch's kind (MPS), or no figures of it
        return None


def release_cached() -> None:
    """Give back what allocators of the accelerator and of page-locked memory keep of freed tensors."""
    release_locked()
    if torch.accelerator.is_available():
        with contextlib.suppress(RuntimeError, NotImplementedError):  # no allocator of torch's kind (MPS)
            torch.accelerator.empty_cache()


@functools.cache
def has_streams(device: torch.device) -> bool:
    """Whether copies can run beside what the accelerator computes; false for the host."""
    if device.type == "cpu":
        return False
    try:
        torch.Stream(device)
    except (RuntimeError, NotImplementedError):  # torch's words for a device that has none: copies wait, then
        return False
    return True


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated on ``device``; None where nothing says."""
    if device.type != "cpu":
        found = _driver(device)
        if found is None:
            return None
        held = _figure(torch.accelerator.memory_reserved, device) or 0
        return found[0] + held - allocated_bytes(device)
    free = available_memory()
    return None if free == UNKNOWN else free


def device_bytes(device: torch.device) -> int | None:
    """The size of an accelerator's memory; None for the host, and where nothing says."""
    found = _driver(device) if device.type != "cpu" else None
    return None if found is None else found[1]


def _driver(device: torch.device) -> tuple[int, int] | None:
    """Free bytes and all bytes of an accelerator, as its driver tells; None where it does not."""
    try:
        free, most = torch.accelerator.get_memory_info(device)
    except (RuntimeError, NotImplementedError):
        return None
    return int(free), int(most)
