"""Memory in use and free, on host and accelerator, and peaks of a load."""

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
    """Peaks of anonymous host and device memory above the start.

    Host memory is sampled. Device memory is the allocator's peak, or sampled if an earlier peak was higher.
    """

    def __init__(self, device: torch.device, interval: float = 0.01) -> None:
        self.device = device
        self.interval = interval
        self.host_bytes = 0
        #: None if the device's allocator reports no peak.
        self.device_bytes: int | None = 0
        #: Maximum sampled bytes, for peaks below an earlier one.
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
        self._take_sample()
        if self.device.type != "cpu":
            peak = peak_bytes(self.device)
            if peak is None:
                self.device_bytes = None
            # If the allocator's peak did not rise, use the samples.
            elif peak > self._peak_before:
                self.device_bytes = peak - self._device_before
            else:
                self.device_bytes = max(0, self._device_seen - self._device_before)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude memory that the body adds, such as imports."""
        self._take_sample()
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
                self._take_sample()

    def _take_sample(self) -> None:
        self.host_bytes = max(self.host_bytes, anonymous_bytes() - self._host_before)
        self._device_seen = max(self._device_seen, allocated_bytes(self.device))


def anonymous_bytes() -> int:
    """Return anonymous and page-locked bytes of this process; 0 if unknown."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024 + locked_bytes()
    return 0


def allocated_bytes(device: torch.device) -> int:
    """Return allocated bytes of an accelerator; 0 if unknown."""
    return _get_figure(torch.accelerator.memory_allocated, device) or 0


def peak_bytes(device: torch.device) -> int | None:
    """Return the peak of allocated bytes; 0 for the host.

    None if the allocator counts nothing.
    """
    return _get_figure(torch.accelerator.max_memory_allocated, device)


def _get_figure(figure: Callable[[torch.device], int], device: torch.device) -> int | None:
    if device.type == "cpu":
        return 0
    try:
        return int(figure(device))
    except (RuntimeError, NotImplementedError):  # no figures, or another kind of allocator (MPS)
        return None


def release_cached() -> None:
    """Free memory that allocators keep of freed tensors."""
    release_locked()
    if torch.accelerator.is_available():
        with contextlib.suppress(RuntimeError, NotImplementedError):  # another kind of allocator (MPS)
            torch.accelerator.empty_cache()


@functools.cache
def has_streams(device: torch.device) -> bool:
    """Return True if copies can run during computations."""
    if device.type == "cpu":
        return False
    try:
        torch.Stream(device)
    except (RuntimeError, NotImplementedError):  # torch's errors for a device without streams
        return False
    return True


def free_bytes(device: torch.device) -> int | None:
    """Return bytes that can still be allocated; None if unknown."""
    if device.type != "cpu":
        figures = _ask_driver(device)
        if figures is None:
            return None
        reserved = _get_figure(torch.accelerator.memory_reserved, device) or 0
        return figures[0] + reserved - allocated_bytes(device)
    free = available_memory()
    return None if free == UNKNOWN else free


def device_bytes(device: torch.device) -> int | None:
    """Return the size of an accelerator's memory; otherwise None."""
    figures = _ask_driver(device) if device.type != "cpu" else None
    return None if figures is None else figures[1]


def _ask_driver(device: torch.device) -> tuple[int, int] | None:
    """Return free and total bytes, or None."""
    try:
        free, most = torch.accelerator.get_memory_info(device)
    except (RuntimeError, NotImplementedError):
        return None
    return int(free), int(most)
