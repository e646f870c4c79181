"""Page-locked host memory of the size that is needed, and memory for many shards.

torch's allocator of page-locked memory rounds up to powers of two and keeps what is freed. So host memory is
registered with the accelerator in pages where its runtime can (``cudaHostRegister``). Elsewhere it is
torch's, and forecasts and limits count the rounding.
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


#: Bytes in use by address; without a lock, for they may go at any moment, in any thread.
_taken: dict[int, int] = {}
#: Bytes that nobody uses and torch's allocator keeps.
_idle: list[int] = []


def locked_bytes() -> int:
    """Bytes of the host that are page-locked now, with what torch's allocator adds to and keeps of them."""
    return sum(list(_taken.values())) + sum(_idle)


def rounds_up() -> bool:
    """Whether page-locked memory here is torch's, in powers of two; no accelerator is begun by asking."""
    if not torch.accelerator.is_available():
        return False
    kind = torch.accelerator.current_accelerator()
    assert kind is not None, "an available accelerator has a type"
    return not any(hasattr(torch.get_device_module(kind), name) for name in _RUNTIMES)


def rounded_up(nbytes: int) -> int:
    """Bytes that torch's allocator takes of the host for ``nbytes`` of page-locked memory."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0  # PowerOf2Ceil in ATen/core/CachingHostAllocator.h


def page_locked(nbytes: int, device: torch.device | None = None) -> torch.Tensor:
    """Allocate page-locked host memory, 1-D, freed with its last view when copies of ``device`` end."""
    runtime = _runtime() if nbytes else None
    if runtime is not None:
        index = device.index if device is not None else None
        pages = _Pages(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        # The tensor keeps the pages alive; they are unregistered when they go (`__del__`), and not before.
        if pages.lock(*runtime, torch.accelerator.current_device_index() if index is None else index):
            return torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]
    return _of_torch(nbytes)


def _of_torch(nbytes: int) -> torch.Tensor:
    # First: what was freed here would stay with torch beside what is taken now.
    release_locked()
    made = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    if nbytes:
        storage = made.untyped_storage()
        _taken[storage.data_ptr()] = rounded_up(nbytes)
        # By the storage, which lives as long as its last view; not at exit, when torch itself may be gone.
        weakref.finalize(storage, _free, storage.data_ptr()).atexit = False
    return made


def _free(address: int) -> None:
    _idle.append(_taken.pop(address, 0))


def release_locked() -> None:
    """Have torch's allocator give back what it keeps of page-locked memory that was freed here."""
    if _idle:
        _idle.clear()
        empty = getattr(torch.accelerator, "empty_host_cache", None)  # not in every release
        with contextlib.suppress(RuntimeError, NotImplementedError):  # no allocator of torch's kind
            if empty is not None:
                empty()


class _Pages(mmap.mmap):
    """Registered pages; shared ones, for a forked process would take copies of private ones."""

    _unregister: Unregister | None = None

    def lock(self, register: Register, unregister: Unregister, device: int) -> bool:
        """Register for copies of ``device``; whether the runtime took them."""
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self))
        with torch.accelerator.device_index(device):
            if int(register(self._address, len(self))):  # type: ignore[call-overload]  # an enumeration or a number
                _forget_error(device)
                return False
        self._device, self._process, self._unregister = device, os.getpid(), unregister
        _taken[self._address] = len(self)
        return True

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        # Nothing is left to do at the end of Python; and what was forked has not registered them.
        if self._unregister is None or ends() or os.getpid() != self._process:
            return
        _taken.pop(self._address, None)
        # To wait for another device than their own would begin to use that one, with some hundred MiB there.
        with torch.accelerator.device_index(self._device):
            try:
                torch.accelerator.synchronize(self._device)  # copies that are under way
            finally:
                self._unregister(self._address)


def _forget_error(index: int) -> None:
    kind = torch.accelerator.current_accelerator()
    assert kind is not None, "it has refused something"
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=torch.device(kind.type, index))


#: What a module of a device has for its runtime: CUDA's and ROCm's, and the one of NPUs.
_RUNTIMES = ("cudart", "npurt")


def _runtime() -> tuple[Register, Unregister] | None:
    """How the accelerator's runtime locks pages and lets them go; None where it cannot be asked."""
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
        # Mapped (2), which wants whole pages and keeps the full rate.
        return lambda address, nbytes: runtime.npuHostRegister(address, nbytes, 2), runtime.npuHostUnregister
    return None


#: Alignment of each tensor in an arena: a cache line, and more than any vector unit or dtype asks for.
ALIGNMENT = 64


class Arena:
    """One buffer for many shards of a device, so that they lie as closely as they are read.

    Reserve all room first: the buffer is allocated when the first tensor is taken, by ``allocate`` if given.
    """

    def __init__(self, device: torch.device, allocate: Callable[[int], torch.Tensor] | None = None) -> None:
        self.device = device
        self._allocate = allocate
        self._size = 0
        self._buffer: torch.Tensor | None = None

    def reserve(self, numel: int, dtype: torch.dtype) -> int:
        """Reserve room for ``numel`` elements; returns the place, to be given to ``take``."""
        place = self._size
        self._size += -(-numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return place

    def take(self, place: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The reserved tensor: 1-D, ``numel`` elements of ``dtype``, uninitialised."""
        if self._buffer is None:
            make = self._allocate or functools.partial(torch.empty, dtype=torch.uint8, device=self.device)
            self._buffer = make(self._size)
        return self._buffer[place : place + numel * dtype.itemsize].view(dtype)
