"""Staging buffers: where reads land that cannot land in place, and how their bytes go on from there.

On the host a thread has one buffer. With an accelerator it has two, page-locked: one is filled from storage
while the other is copied to the device, on a stream of the thread's own, and cast there. Tested on one H200
and on the pretend accelerator (docs/status.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import product
from typing import Any

import torch

from zerostart.geometry import Loop
from zerostart.transfer.buffers import page_locked
from zerostart.transfer.meter import has_streams
from zerostart.transfer.planning import Part
from zerostart.transfer.planning.plan import is_one_run

#: Streams that no thread uses now, by device.
_idle: dict[torch.device, list[torch.Stream]] = {}


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[torch.Stream | None]:
    """Work under a stream of ``device`` that no other thread uses; None if the device has none.

    Streams are used again, since the allocator keeps memory for each.
    """
    if not has_streams(device):
        yield None
        return
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    idle = _idle.setdefault(torch.device(device.type, index), [])
    try:
        stream = idle.pop()
    except IndexError:
        stream = torch.Stream(device)
    try:
        with stream:
            # A thread has no context of the device before it first asks it for something; cuBLAS warns then.
            stream.query()
            yield stream
    finally:
        idle.append(stream)


def bytes_view(tensor: torch.Tensor) -> memoryview:
    """A writable view of a contiguous host tensor's bytes."""
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)


class HostStaging:
    """One thread's buffer on the host, for a ``with`` in that thread; what is delivered is in its place."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    @cached_property
    def _buffer(self) -> torch.Tensor:
        return torch.empty(self._nbytes, dtype=torch.uint8, device="cpu")

    def __enter__(self) -> HostStaging:
        return self

    def __exit__(self, *error: object) -> None: ...

    def view(self, nbytes: int) -> memoryview:
        """Room for the next ``nbytes``."""
        return bytes_view(self._buffer)[:nbytes]

    def deliver(self, parts: Sequence[Part], storages: Sequence[torch.Tensor]) -> None:
        """Copy the parts."""
        for part in parts:
            self.put(part, self._buffer, storages[part.target])

    def put(self, part: Part, data: torch.Tensor, storage: torch.Tensor) -> None:
        """Copy one part."""
        raw = data[part.at : part.at + part.nbytes]
        # The offset of ``data`` counts too: results of computations and registers come as views.
        if (data.storage_offset() + part.at) % part.dtype.itemsize:
            # A tensor of a coalesced read may begin at an offset that its dtype cannot be viewed at.
            raw = raw.clone()
        copy_strided(storage, part.to, raw.view(part.dtype), part.loops)


class DeviceStaging(HostStaging):
    """Page-locked buffers in turn, a stream, and a buffer on the device.

    Each chunk takes few calls of torch: with eight threads, handing over the interpreter's lock at each call
    took longer than the copies.
    """

    def __init__(self, nbytes: int, depth: int, device: torch.device) -> None:
        super().__init__(nbytes)
        self._depth = depth
        self._device = device
        self._pinned = has_streams(device)
        self._turn = 0
        self._stream: torch.Stream | None = None
        #: Of each buffer the event after its last copy; None before the first.
        self._sent: list[torch.Event | None] = [None] * depth
        self._within = contextlib.ExitStack()

    def __enter__(self) -> DeviceStaging:
        self._within.enter_context(torch.no_grad())
        self._stream = self._within.enter_context(own_stream(self._device))
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._wait()
        finally:
            self._within.close()

    @cached_property
    def _host(self) -> list[tuple[torch.Tensor, memoryview]]:
        buffers = [
            page_locked(self._nbytes, self._device)
            if self._pinned
            else torch.empty(self._nbytes, dtype=torch.uint8, device="cpu")
            for _ in range(self._depth)
        ]
        return [(buffer, bytes_view(buffer)) for buffer in buffers]

    @cached_property
    def _raw(self) -> torch.Tensor:
        # Made under the stream that uses it, as the caching allocator wants it.
        return torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)

    def view(self, nbytes: int) -> memoryview:
        """Room for the next ``nbytes``; waits until what was in it has left for the device."""
        sent = self._sent[self._turn]
        # The copy out of this buffer may still be under way; `depth` buffers let the disk and the bus work at
        # once.
        if sent is not None:
            sent.synchronize()
        return self._host[self._turn][1][:nbytes]

    def deliver(self, parts: Sequence[Part], storages: Sequence[torch.Tensor]) -> None:
        """Send the parts on their way; the next room is in another buffer."""
        host, _ = self._host[self._turn]
        for part in parts:
            self._send(part, host, storages[part.target])
        if self._stream is not None:
            # One event for the whole buffer: the stream's copies are in order.
            self._sent[self._turn] = self._stream.record_event()
        # Only here: ``view`` and ``deliver`` of one read use the same buffer.
        self._turn = (self._turn + 1) % self._depth

    def put(self, part: Part, data: torch.Tensor, storage: torch.Tensor) -> None:
        """Send one part and wait for it: the caller's memory is pageable, and is forgotten."""
        self._send(part, data, storage)
        self._wait()

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _send(self, part: Part, data: torch.Tensor, storage: torch.Tensor) -> None:
        # A register, a tensor that stays on the host, or one on a device whose streams are not waited for.
        if storage.device != self._device:
            super().put(part, data, storage)
            return
        source = data[part.at : part.at + part.nbytes]
        # As it is to be: from pinned memory straight to its place, without the buffer on the device.
        if part.dtype == storage.dtype and is_one_run(part.loops):
            place = storage[part.to : part.to + part.nbytes // part.dtype.itemsize]
            place.view(torch.uint8).copy_(source, non_blocking=self._pinned)
        elif part.nbytes <= self._nbytes:
            # From the start of the buffer, so that any dtype can be viewed there.
            raw = self._raw[: part.nbytes]
            # To the device as stored, and cast there: fewer bytes over the bus, and no work for the host. All
            # parts share this one buffer, since the stream runs one copy after the other.
            raw.copy_(source, non_blocking=self._pinned)
            copy_strided(storage, part.to, raw.view(part.dtype), part.loops)
        else:  # the result of a computation that could not be cut
            super().put(part, data, storage)


def make_staging(nbytes: int, depth: int, device: torch.device | None) -> HostStaging:
    """Staging in buffers of ``nbytes``: ``depth`` of them on the way to ``device``, one without a device."""
    return HostStaging(nbytes) if device is None else DeviceStaging(nbytes, depth, device)


#: Elements on one side of a block, and bytes of a block: small enough for the second-level cache, with
#: rows long enough for the copies to and from it.
SIDE, BLOCK = 512, 256 << 10


def copy_strided(target: torch.Tensor, to: int, source: torch.Tensor, loops: Sequence[Loop]) -> None:
    """Copy between 1-D tensors by ``loops`` of (size, source stride, destination stride), cast as needed."""
    # An accelerator has kernels of its own for this; on the host a plain strided copy of a transposition
    # misses the cache at nearly every element.
    turned = _transposition(loops) if source.device.type == target.device.type == "cpu" else None
    with torch.no_grad():
        if turned is None:
            _view(target, to, loops, 2).copy_(_view(source, 0, loops, 1))
            return
        inner, outer, others = turned
        for indices in product(*(range(size) for size, _, _ in others)):
            start = sum(i * loop[1] for i, loop in zip(indices, others, strict=True))
            place = to + sum(i * loop[2] for i, loop in zip(indices, others, strict=True))
            _transpose(_view(target, place, (inner, outer), 2), _view(source, start, (outer, inner), 1))


def _view(tensor: torch.Tensor, start: int, loops: Sequence[Loop], side: int) -> torch.Tensor:
    sizes, strides = [loop[0] for loop in loops], [loop[side] for loop in loops]
    return tensor.as_strided(sizes, strides, tensor.storage_offset() + start)


def _transposition(loops: Sequence[Loop]) -> tuple[Loop, Loop, list[Loop]] | None:
    """The loop that is dense in the source, the one that is dense in the destination, and the rest.

    None unless both are long and differ: a copy whose inner loop is dense on both sides, or on none, has
    nothing to gain from blocks.
    """
    inner = next((loop for loop in loops if loop[1] == 1), None)
    outer = next((loop for loop in loops if loop[2] == 1), None)
    if inner is None or outer is None or inner is outer or min(inner[0], outer[0]) < SIDE // 16:
        return None
    return inner, outer, [loop for loop in loops if loop is not inner and loop is not outer]


def _transpose(target: torch.Tensor, source: torch.Tensor) -> None:
    """``target[:] = source.t()`` for a source with dense rows and a target with dense rows.

    torch transposes well from a dense block to a dense block, so each block is made dense on either side.
    """
    rows, columns = source.shape
    # Two blocks, each within the second-level cache: the source's rows made dense, and their transpose.
    width = BLOCK // (SIDE * source.itemsize)
    room = source.new_empty(2, SIDE * width)
    for i in range(0, rows, SIDE):
        for j in range(0, columns, width):
            part = source[i : i + SIDE, j : j + width]
            block = room[0, : part.numel()].view(part.shape).copy_(part)
            turned = room[1, : part.numel()].view(part.shape[::-1]).copy_(block.t())
            target[j : j + width, i : i + SIDE].copy_(turned)
