"""Private parts of DeepSpeed: memory that the constructor of the ZeRO-3 optimizer takes for nothing.

Known for the versions in ``upstream.deepspeed.SUPPORTED`` (runtime/zero/stage3.py). Two methods are run with
an eye on what they allocate:

- ``_create_fp32_partitions`` converts a sub-group (by default all of a rank's share) to fp32 and keeps a
  clone of what it has just made: for a moment there are two masters.
- ``initialize_optimizer_states`` makes a gradient buffer as large as the largest sub-group. Where no states
  are swapped, nobody reads it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["Converted", "Unread"]


class Converted(TorchFunctionMode):
    """Inside, ``x.to(...).clone()`` makes one new tensor and not two."""

    def __init__(self) -> None:
        super().__init__()
        self._made: torch.Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.clone and args[0] is self._made:
            return self._made
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.to:
            fresh = result.untyped_storage().data_ptr() != args[0].untyped_storage().data_ptr()
            self._made = result if fresh else None
        return result


class Unread(TorchFunctionMode):
    """Inside, the first ``torch.zeros(n)`` is one zero, seen n times: enough for what is never written."""

    def __init__(self) -> None:
        super().__init__()
        self._done = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.zeros and not self._done:
            self._done = True
            return torch.zeros(1, **(kwargs or {})).expand(*args)
        return func(*args, **(kwargs or {}))
