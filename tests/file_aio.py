"""DeepSpeed's asynchronous file operations in plain Python, for hosts without libaio.

Only the C++ extension is replaced, which needs libaio; the swappers that call it are DeepSpeed's.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


class FileHandle:
    """Synchronous version of the ``aio_handle`` methods that the swappers call."""

    def __init__(self, **_: Any) -> None:
        self._finished = 0
        self._pinned: list[torch.Tensor] = []

    def new_cpu_locked_tensor(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        tensor = torch.zeros(numel, dtype=like.dtype)
        self._pinned.append(tensor)
        return tensor

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        self._pinned = [t for t in self._pinned if t is not tensor]
        return True

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        starts = {t.untyped_storage().data_ptr() for t in self._pinned}
        return tensor.untyped_storage().data_ptr() in starts

    def async_pwrite(self, buffer: torch.Tensor, path: str, offset: int) -> int:
        assert offset == 0
        Path(path).write_bytes(buffer.detach().contiguous().view(torch.uint8).numpy().tobytes())
        self._finished += 1
        return 0

    def async_pread(self, buffer: torch.Tensor, path: str, offset: int) -> int:
        assert offset == 0
        raw = bytearray(Path(path).read_bytes())
        buffer.detach().view(-1).copy_(torch.frombuffer(raw, dtype=buffer.dtype)[: buffer.numel()])
        self._finished += 1
        return 0

    def wait(self) -> int:
        count, self._finished = self._finished, 0
        return count


def is_compilable() -> bool:
    """Return True if this host can compile DeepSpeed's own extension."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(AsyncIOBuilder().is_compatible(verbose=False))


def install() -> None:
    """Make DeepSpeed use these operations in this process."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    AsyncIOBuilder.is_compatible = lambda self, verbose=False: True
    AsyncIOBuilder.load = lambda self, verbose=True: SimpleNamespace(aio_handle=FileHandle)
