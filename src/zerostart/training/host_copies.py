"""Activations that wait for the backward in pinned host memory, copied while the device computes.

What ``torch.autograd.graph.save_on_cpu`` does with each copy waited for. Here copies run on a stream of their
own, and the one that the backward will ask for next is on its way while the one before it is used.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

__all__ = ["on_host"]


def on_host(offload: bool) -> AbstractContextManager[Any]:
    """Inside, if ``offload``, what autograd saves of activations on a device waits in host memory."""
    if not offload:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)


def _pack(tensor: torch.Tensor) -> Any:
    # What needs no gradient is the caller's, for all layers alike, and parameters are the model's.
    moves = tensor.device.type != "cpu" and tensor.requires_grad and not isinstance(tensor, nn.Parameter)
    return _lane(tensor.device).away(tensor) if moves else tensor


def _unpack(packed: Any) -> torch.Tensor:
    return packed.lane.back(packed) if isinstance(packed, _Away) else packed


class _Away:
    """One tensor in host memory, and its copy on the device once that is on its way back."""

    def __init__(self, lane: _Lane, host: torch.Tensor, before: _Away | None) -> None:
        self.lane, self.host = lane, host
        #: What was packed before it is unpacked after it.
        self.before = None if before is None else weakref.ref(before)
        self.returned: tuple[torch.Tensor, torch.Event] | None = None


class _Lane:
    """The copies of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)
        self._last: weakref.ref[_Away] | None = None

    def away(self, tensor: torch.Tensor) -> _Away:
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            host.copy_(tensor.detach(), non_blocking=True)
        tensor.record_stream(self._stream)
        packed = _Away(self, host, None if self._last is None else self._last())
        self._last = weakref.ref(packed)
        return packed

    def back(self, packed: _Away) -> torch.Tensor:
        tensor, arrived = self._bring(packed)
        packed.returned = None
        current = torch.accelerator.current_stream(self._device)
        current.wait_event(arrived)
        tensor.record_stream(current)
        if packed.before is not None and (following := packed.before()) is not None:
            self._bring(following)
        return tensor

    def _bring(self, packed: _Away) -> tuple[torch.Tensor, torch.Event]:
        if packed.returned is None:
            with self._stream:
                tensor = packed.host.to(self._device, non_blocking=True)
            packed.returned = (tensor, self._stream.record_event())
        return packed.returned


@functools.cache
def _lane(device: torch.device) -> _Lane:
    return _Lane(device)
