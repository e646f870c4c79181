"""Page-locked host memory of the exact size, and arenas for many shards.

torch's allocator rounds page-locked memory up to powers of two and keeps freed memory. So huge pages are
registered with the accelerator where its runtime allows it (``cudaHostRegister``). Elsewhere torch allocates,
and only the measured peaks count the rounding.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import sys
import weakref
from collections.abc import Callable

import torch

Register = Callable[[int, int], object]
Unregister = Callable[[int], object]


#: Bytes that torch has page-locked, by address. No lock: memory may be freed at any moment in any thread.
_bytes_in_use: dict[int, int] = {}
#: Freed bytes that torch's allocator keeps.
_idle_bytes: list[int] = []


def locked_bytes() -> int:
    """Return bytes that torch has page-locked, with its rounding and freed memory; they are not anonymous."""
    return sum(list(_bytes_in_use.values())) + sum(_idle_bytes)


def rounded_up(nbytes: int) -> int:
    """Return the page-locked bytes that torch takes for ``nbytes``."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0  # PowerOf2Ceil in ATen/core/CachingHostAllocator.h


def page_locked(nbytes: int, device: torch.device | None = None) -> torch.Tensor:
    """Allocate 1-D page-locked memory for copies of ``device``.

    It is freed with its last view, after running copies.
    """
    runtime = _find_runtime() if nbytes else None
    if runtime is not None:
        index = device.index if device is not None else None
        whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        pages = _Pages(-1, whole + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # The tensor keeps the pages alive; `__del__` unregisters them.
        if pages.lock(*runtime, torch.accelerator.current_device_index() if index is None else index):
            return torch.frombuffer(pages, dtype=torch.uint8, count=nbytes, offset=pages.start)
    return _allocate_by_torch(nbytes)


def _allocate_by_torch(nbytes: int) -> torch.Tensor:
    # First, since torch keeps freed memory in addition to the new one.
    release_locked()
    tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    if nbytes:
        storage = tensor.untyped_storage()
        _bytes_in_use[storage.data_ptr()] = rounded_up(nbytes)
        # Finalize the storage, which lives as long as its last view; not at exit, when torch may be gone.
        weakref.finalize(storage, _free, storage.data_ptr()).atexit = False
    return tensor


def _free(address: int) -> None:
    _idle_bytes.append(_bytes_in_use.pop(address, 0))


def release_locked() -> None:
    """Let torch's allocator free page-locked memory that it keeps."""
    if _idle_bytes:
        _idle_bytes.clear()
        # Another kind of allocator, or an older torch.
        with contextlib.suppress(RuntimeError, NotImplementedError, AttributeError):
            torch.accelerator.empty_host_cache()


#: Bytes of a huge page on x86 and most ARM machines.
HUGE_PAGE = 2 << 20
#: MADV_WIPEONFORK of Linux: forked processes have zeros there, and this process keeps its pages.
_WIPE_ON_FORK = 18


class _Pages(mmap.mmap):
    """Private pages to register, with room to start on a huge page."""

    _unregister: Unregister | None = None

    def lock(self, register: Register, unregister: Unregister, device: int) -> bool:
        """Register the pages from ``start`` on for ``device``; False if the runtime refuses."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self))
        self.start, nbytes = -address % HUGE_PAGE, len(self) - HUGE_PAGE
        self._address = address + self.start
        with contextlib.suppress(OSError):  # another kind of kernel
            # Otherwise a fork copies registered pages.
            self.madvise(_WIPE_ON_FORK)
            # Only whole ones, so that the end takes no more memory than its bytes.
            self.madvise(mmap.MADV_HUGEPAGE, self.start, nbytes // HUGE_PAGE * HUGE_PAGE)
        with torch.accelerator.device_index(device):
            if int(register(self._address, nbytes)):  # type: ignore[call-overload]  # an enumeration or a number
                _forget_error(device)
                return False
        self._device, self._process, self._unregister = device, os.getpid(), unregister
        return True

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        # There is no work at the end of Python, or in a forked process, which registered no pages.
        if self._unregister is None or ends() or os.getpid() != self._process:
            return
        # Use the pages' own device: starting another one would take some hundred MiB there.
        with torch.accelerator.device_index(self._device):
            try:
                torch.accelerator.synchronize(self._device)  # running copies
            finally:
                self._unregister(self._address)


def _forget_error(index: int) -> None:
    kind = torch.accelerator.current_accelerator()
    assert kind is not None, "it has refused something"
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=torch.device(kind.type, index))


#: Attributes of device modules with a runtime: for CUDA and ROCm, and for NPUs.
_RUNTIMES = ("cudart", "npurt")


def _find_runtime() -> tuple[Register, Unregister] | None:
    """Return the runtime's functions to lock and unlock pages, or None."""
    kind = torch.accelerator.current_accelerator()
    assert kind is not None, "page-locked memory is for an accelerator"
    module = torch.get_device_module(kind)
    if hasattr(module, "cudart"):
        runtime = module.cudart()
        return lambda address, nbytes: runtime.cudaHostRegister(
            address, nbytes, 0
        ), runtime.cudaHostUnregister
    if hasattr(module, "npurt"):
        runtime = module.npurt()
        # Mapped (2), which needs whole pages and keeps the full rate.
        return lambda address, nbytes: runtime.npuHostRegister(address, nbytes, 2), runtime.npuHostUnregister
    return None


#: Alignment of tensors in an arena, in bytes: one cache line, enough for any dtype.
ALIGNMENT = 64


class Arena:
    """One buffer for many shards of a device.

    Reserve all room first. The buffer is allocated with the first tensor, by ``allocate`` if given.
    """

    def __init__(self, device: torch.device, allocate: Callable[[int], torch.Tensor] | None = None) -> None:
        self.device = device
        self._allocate = allocate
        self._size = 0
        self._buffer: torch.Tensor | None = None

    def reserve(self, numel: int, dtype: torch.dtype) -> int:
        """Reserve room for ``numel`` elements; return the offset for ``take``."""
        place = self._size
        self._size += -(-numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return place

    def take(self, place: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a reserved 1-D tensor, uninitialised."""
        if self._buffer is None:
            make = self._allocate or functools.partial(torch.empty, dtype=torch.uint8, device=self.device)
            self._buffer = make(self._size)
        return self._buffer[place : place + numel * dtype.itemsize].view(dtype)
