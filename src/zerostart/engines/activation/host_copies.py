"""Activations that wait for the backward in pinned host memory, copied while the device computes.

What ``torch.autograd.graph.save_on_cpu`` does with each copy waited for. Here copies run on a stream of their
own, and the one that the backward will ask for next is on its way while the one before it is used.

A copy has the values of the moment at which it was asked for. What is computed after the function waits
for it, and may write to the tensor. The function itself runs beside it, and may not; nor may anybody write to
what stays where it is. Both are found by the counter of writes that autograd keeps of each tensor, and looks
at itself where no hooks stand in between.

The memory is page-locked once and used again and again: steps that are alike take none anew, and all that is
taken is the most that was in use (up to twice that, where the sizes of batches vary).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator

import torch
from torch import nn

from zerostart.errors import ConfigError
from zerostart.transfer.buffers import page_locked
from zerostart.transfer.meter import has_streams


@contextlib.contextmanager
def on_host(offload: bool) -> Iterator[None]:
    """Inside, if ``offload``, what autograd saves of activations on a device waits in host memory.

    The backward then raises ConfigError for a tensor that was written to inside or, where it stayed on its
    device, at any time since.
    """
    if not offload:
        yield
        return
    sent: list[tuple[torch.Tensor, _HostCopy]] = []

    def pack(tensor: torch.Tensor) -> _OnDevice | _HostCopy:
        # What needs no gradient is the caller's, for all layers alike, and parameters are the model's.
        if not has_streams(tensor.device) or not tensor.requires_grad or isinstance(tensor, nn.Parameter):
            return _OnDevice(tensor)
        copy = _copy_stream(tensor.device).send(tensor)
        sent.append((tensor, copy))
        return copy

    # After the block: the function has run, and any write to a tensor meanwhile shows in its version.
    with torch.autograd.graph.saved_tensors_hooks(pack, _value):
        yield
    for tensor, copy in sent:
        copy.settle(tensor)


def _value(packed: _OnDevice | _HostCopy) -> torch.Tensor:
    return packed.value()


def _written(shape: torch.Size) -> ConfigError:
    return ConfigError(
        f"a tensor of shape {tuple(shape)} was an input of gradient checkpointing and was changed "
        "in place before the backward, which computes from it again; let the function write to a "
        "clone()"
    )


class _OnDevice:
    """A tensor that is kept where it is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._writes = tensor, tensor._version

    def value(self) -> torch.Tensor:
        if self._tensor._version != self._writes:
            raise _written(self._tensor.shape)
        return self._tensor


class _HostCopy:
    """One tensor in host memory, and its copy on the device once that is on its way back."""

    def __init__(self, copies: _CopyStream, tensor: torch.Tensor, before: _HostCopy | None) -> None:
        self.copies, self.host = copies, copies.room_for(tensor, self)
        self._writes, self._overwritten = tensor._version, False
        #: What was packed before it is unpacked after it.
        self.before = None if before is None else weakref.ref(before)
        self.returned: tuple[torch.Tensor, torch.Event] | None = None

    def settle(self, tensor: torch.Tensor) -> None:
        """The function is over: what is written from now on comes after the copy."""
        self._overwritten = tensor._version != self._writes
        self.copies.wait()

    def value(self) -> torch.Tensor:
        if self._overwritten:
            raise _written(self.host.shape)
        return self.copies.fetch(self)


class _CopyStream:
    """The copies of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)
        self._last: weakref.ref[_HostCopy] | None = None
        #: Page-locked memory in which nothing is, by address. Any thread may add to it, or take from it.
        self._idle: dict[int, torch.Tensor] = {}

    def send(self, tensor: torch.Tensor) -> _HostCopy:
        # The stream waits for what computes the tensor; nothing waits for the stream until ``settle``.
        packed = _HostCopy(self, tensor, None if self._last is None else self._last())
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            packed.host.copy_(tensor.detach(), non_blocking=True)
        # Autograd may free it while the copy reads: its memory is not to be given away before.
        tensor.record_stream(self._stream)
        # Weakly: a chain of strong references would keep all copies of a step until its end.
        self._last = weakref.ref(packed)
        return packed

    def room_for(self, tensor: torch.Tensor, packed: _HostCopy) -> torch.Tensor:
        """A host tensor like ``tensor``, whose memory is used again when ``packed`` is no more.

        Copies out of it may be under way then: all are on one stream, and the next comes after them.
        """
        if type(tensor) is not torch.Tensor:  # a DTensor lies in memory as only torch knows
            return torch.empty_like(tensor, device="cpu", pin_memory=True)
        like = torch.empty_like(tensor, device="meta")
        nbytes = like.untyped_storage().nbytes()
        room = self._room(nbytes)
        # Back to the idle ones by whichever thread drops the last reference; a dictionary's item is set at
        # once.
        weakref.finalize(packed, self._idle.__setitem__, room.data_ptr(), room).atexit = False
        return room[:nbytes].view(tensor.dtype).as_strided(like.shape, like.stride())

    def _room(self, nbytes: int) -> torch.Tensor:
        """At least ``nbytes`` of page-locked memory."""
        idle = [(room.nbytes, address) for address, room in list(self._idle.items())]
        for size, address in sorted(idle):
            # Not much larger, or small tensors would hold large rooms; taken only if no other thread was
            # faster.
            if nbytes <= size <= 2 * nbytes and (room := self._idle.pop(address, None)) is not None:
                return room
        freed = 0
        for size, address in idle:  # of other sizes: no more is kept than was in use
            if freed < nbytes:
                freed += size
                self._idle.pop(address, None)
        return page_locked(nbytes, self._device)

    def wait(self) -> None:
        """What is computed from now on comes after the copies that were asked for."""
        torch.accelerator.current_stream(self._device).wait_stream(self._stream)

    def fetch(self, packed: _HostCopy) -> torch.Tensor:
        tensor, arrived = self._bring(packed)
        # Autograd holds the value from here on; a second use (a retained graph) brings it again.
        packed.returned = None
        current = torch.accelerator.current_stream(self._device)
        current.wait_event(arrived)
        # Made on the side stream, used on this one: freed there it could be given away while still read here.
        tensor.record_stream(current)
        # What was sent before this one is asked for next: its copy goes while this one is used.
        if packed.before is not None and (following := packed.before()) is not None:
            self._bring(following)
        return tensor

    def _bring(self, packed: _HostCopy) -> tuple[torch.Tensor, torch.Event]:
        if packed.returned is None:
            with self._stream:
                tensor = packed.host.to(self._device, non_blocking=True)
            packed.returned = (tensor, self._stream.record_event())
        return packed.returned


@functools.cache
def _copy_stream(device: torch.device) -> _CopyStream:
    return _CopyStream(device)
