"""Page-locked host memory of exactly the size that is needed, and only for as long.

torch's own allocator of such memory rounds up to powers of two and keeps what is freed for the life of the
process: one buffer of 74 304 bytes takes 131 072. So memory of the host is registered with the accelerator
instead, in pages, where its runtime can (``cudaHostRegister``, and what others call it); elsewhere it is
torch's.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

import torch

__all__ = ["page_locked"]

Register = Callable[[int, int], object]
Unregister = Callable[[int], object]


def page_locked(nbytes: int) -> torch.Tensor:
    """``nbytes`` bytes of page-locked host memory, 1-D and uninitialised; freed with their last view."""
    runtime = _runtime() if nbytes else None
    if runtime is None:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    pages = _Pages(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    if not pages.lock(*runtime):
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    return torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]


class _Pages(mmap.mmap):
    """Pages that are registered until they go."""

    _unregister: Unregister | None = None

    def lock(self, register: Register, unregister: Unregister) -> bool:
        """Register; whether the runtime took them."""
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self))
        if int(register(self._address, len(self))):  # type: ignore[call-overload]  # an enumeration or a number
            return False
        self._unregister = unregister
        return True

    def __del__(self) -> None:
        if self._unregister is not None and torch is not None:  # at the end of Python nothing is left to do
            for index in range(torch.accelerator.device_count()):
                torch.accelerator.synchronize(index)  # copies that are under way
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
