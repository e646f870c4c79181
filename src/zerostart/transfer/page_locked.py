"""Page-locked host memory of exactly the size that is needed, and only for as long.

torch's own allocator of such memory rounds up to powers of two and keeps what is freed for the life of the
process: one buffer of 74 304 bytes takes 131 072. So memory of the host is registered with the accelerator
instead, in pages, where its runtime can (``cudaHostRegister``, and what others call it); elsewhere it is
torch's.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable

import torch

__all__ = ["page_locked", "registered_bytes"]

Register = Callable[[int, int], object]
Unregister = Callable[[int], object]


#: Bytes by address; without a lock, for they may go at any moment, in any thread.
_registered: dict[int, int] = {}


def registered_bytes() -> int:
    """Bytes of the host that are registered now."""
    return sum(list(_registered.values()))


def page_locked(nbytes: int, device: torch.device | None = None) -> torch.Tensor:
    """``nbytes`` bytes of page-locked host memory, 1-D and uninitialised; freed with their last view.

    For copies from and to ``device``, the current one if none is given: these alone are waited for before
    the memory goes.
    """
    runtime = _runtime() if nbytes else None
    if runtime is None:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    index = device.index if device is not None else None
    pages = _Pages(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    if not pages.lock(*runtime, torch.accelerator.current_device_index() if index is None else index):
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    return torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]


class _Pages(mmap.mmap):
    """Pages that are registered until they go.

    They are shared, as ``mmap`` makes them: of private ones a process that is forked (a worker of a data
    loader) would take copies, of those that an accelerator may write to at once.
    """

    _unregister: Unregister | None = None

    def lock(self, register: Register, unregister: Unregister, device: int) -> bool:
        """Register for copies of ``device``; whether the runtime took them."""
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self))
        with torch.accelerator.device_index(device):
            if int(register(self._address, len(self))):  # type: ignore[call-overload]  # an enumeration or a number
                return False
        self._device, self._process, self._unregister = device, os.getpid(), unregister
        _registered[self._address] = len(self)
        return True

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        # Nothing is left to do at the end of Python; and what was forked has not registered them.
        if self._unregister is None or ends() or os.getpid() != self._process:
            return
        _registered.pop(self._address, None)
        # To wait for another device than their own would begin to use that one, with some hundred MiB there.
        with torch.accelerator.device_index(self._device):
            try:
                torch.accelerator.synchronize(self._device)  # copies that are under way
            finally:
                self._unregister(self._address)


def _runtime() -> tuple[Register, Unregister] | None:
    """How the accelerator's runtime locks pages and lets them go; None where it cannot be asked."""
    kind = torch.accelerator.current_accelerator()
    assert kind is not None, "page-locked memory is for an accelerator"
    module = torch.get_device_module(kind)
    if hasattr(module, "cudart"):  # ROCm's too
        runtime = module.cudart()
        return lambda address, nbytes: runtime.cudaHostRegister(
            address, nbytes, 0
        ), runtime.cudaHostUnregister
    if hasattr(module, "npurt"):
        runtime = module.npurt()
        # Mapped (2), which wants whole pages and keeps the full rate.
        return lambda address, nbytes: runtime.npuHostRegister(address, nbytes, 2), runtime.npuHostUnregister
    return None
