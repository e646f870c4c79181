"""Staging buffers for reads that cannot land in place.

On the host, a thread has one buffer. For an accelerator it has two page-locked ones: one is filled from
storage while the other is copied to the device, on the thread's own stream, and cast there. Tested on one
H200 and on the pretend accelerator (docs/status.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import product
from typing import Any

import torch

from zerostart.geometry import Loop, is_one_run
from zerostart.transfer.buffers import page_locked
from zerostart.transfer.meter import has_streams
from zerostart.transfer.planning import Part

#: Unused streams by device.
_idle: dict[torch.device, list[torch.Stream]] = {}


@contextlib.contextmanager
def use_stream(device: torch.device) -> Iterator[torch.Stream | None]:
    """Use a stream that no other thread uses, if the device has streams.

    Streams are reused, since the allocator keeps memory for each.
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
            # Create the thread's context of the device first; otherwise cuBLAS warns.
            stream.query()
            yield stream
    finally:
        idle.append(stream)


def view_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a writable view of a contiguous host tensor's bytes."""
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)


class HostStaging:
    """One thread's host buffer, used in a ``with`` block."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    @cached_property
    def _buffer(self) -> torch.Tensor:
        return torch.empty(self._nbytes, dtype=torch.uint8, device="cpu")

    def __enter__(self) -> HostStaging:
        return self

    def __exit__(self, *error: object) -> None: ...

    def view(self, nbytes: int) -> memoryview:
        """Return room for the next ``nbytes``."""
        return view_bytes(self._buffer)[:nbytes]

    def deliver(self, parts: Sequence[Part], storages: Sequence[torch.Tensor]) -> None:
        """Copy the parts of the last read."""
        for part in parts:
            self.copy_part(part, self._buffer, storages[part.target])

    def copy_part(self, part: Part, data: torch.Tensor, storage: torch.Tensor) -> None:
        """Copy one part of ``data``."""
        raw = data[part.at : part.at + part.nbytes]
        # ``data`` may be a view that starts later in its storage.
        if (data.storage_offset() + part.at) % part.dtype.itemsize:
            # The offset does not fit the dtype.
            raw = raw.clone()
        copy_strided(storage, part.to, raw.view(part.dtype), part.loops)


class DeviceStaging(HostStaging):
    """Page-locked buffers in turn, a stream, and a device buffer.

    Each chunk takes few calls of torch: with eight threads, passing on the interpreter's lock took longer
    than the copies.
    """

    def __init__(self, nbytes: int, depth: int, device: torch.device) -> None:
        super().__init__(nbytes)
        self._depth = depth
        self._device = device
        self._pinned = has_streams(device)
        self._turn = 0
        self._stream: torch.Stream | None = None
        #: For each buffer the event after its last copy.
        self._sent: list[torch.Event | None] = [None] * depth
        self._within = contextlib.ExitStack()

    def __enter__(self) -> DeviceStaging:
        self._within.enter_context(torch.no_grad())
        self._stream = self._within.enter_context(use_stream(self._device))
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
        return [(buffer, view_bytes(buffer)) for buffer in buffers]

    @cached_property
    def _raw(self) -> torch.Tensor:
        # Created under the stream that uses it, for the caching allocator.
        return torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)

    def view(self, nbytes: int) -> memoryview:
        """Return room, once its earlier contents are copied."""
        event = self._sent[self._turn]
        # The buffers let storage and bus work at the same time.
        if event is not None:
            event.synchronize()
        return self._host[self._turn][1][:nbytes]

    def deliver(self, parts: Sequence[Part], storages: Sequence[torch.Tensor]) -> None:
        """Start copying the parts; the next read uses another buffer."""
        host, _ = self._host[self._turn]
        for part in parts:
            self._send(part, host, storages[part.target])
        if self._stream is not None:
            # One event is enough, since the stream's copies are in order.
            self._sent[self._turn] = self._stream.record_event()
        # Here, since ``view`` and ``deliver`` of one read use the same buffer.
        self._turn = (self._turn + 1) % self._depth

    def copy_part(self, part: Part, data: torch.Tensor, storage: torch.Tensor) -> None:
        """Copy one part and wait, since its memory is pageable."""
        self._send(part, data, storage)
        self._wait()

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _send(self, part: Part, data: torch.Tensor, storage: torch.Tensor) -> None:
        # A register, or a tensor on the host or on another device.
        if storage.device != self._device:
            super().copy_part(part, data, storage)
            return
        source = data[part.at : part.at + part.nbytes]
        # No cast and one run: copy from page-locked memory straight into place.
        if part.dtype == storage.dtype and is_one_run(part.loops):
            place = storage[part.to : part.to + part.nbytes // part.dtype.itemsize]
            place.view(torch.uint8).copy_(source, non_blocking=self._pinned)
        elif part.nbytes <= self._nbytes:
            # Start of the buffer, where any dtype can be viewed.
            raw = self._raw[: part.nbytes]
            # Copy as stored and cast on the device: fewer bytes, and no work for the host. The stream runs
            # one copy after another, so all parts can share this buffer.
            raw.copy_(source, non_blocking=self._pinned)
            copy_strided(storage, part.to, raw.view(part.dtype), part.loops)
        else:  # an uncut result, larger than the buffer
            super().copy_part(part, data, storage)


def make_staging(nbytes: int, depth: int, device: torch.device | None) -> HostStaging:
    """Create staging buffers of ``nbytes``: ``depth`` for ``device``, otherwise one."""
    return HostStaging(nbytes) if device is None else DeviceStaging(nbytes, depth, device)


#: Rows of a block, and its bytes: it fits the second-level cache, with long rows for copies.
SIDE, BLOCK = 512, 256 << 10


def copy_strided(target: torch.Tensor, to: int, source: torch.Tensor, loops: Sequence[Loop]) -> None:
    """Copy 1-D tensors by loops of (size, source stride, target stride).

    Elements are cast if the dtypes differ.
    """
    # On the host, a plain strided copy of a transposition misses the cache at nearly every element.
    turned = _find_transposition(loops) if source.device.type == target.device.type == "cpu" else None
    with torch.no_grad():
        if turned is None:
            _view_loops(target, to, loops, 2).copy_(_view_loops(source, 0, loops, 1))
            return
        inner, outer, others = turned
        for indices in product(*(range(size) for size, _, _ in others)):
            start = sum(i * loop[1] for i, loop in zip(indices, others, strict=True))
            place = to + sum(i * loop[2] for i, loop in zip(indices, others, strict=True))
            _transpose(
                _view_loops(target, place, (inner, outer), 2), _view_loops(source, start, (outer, inner), 1)
            )


def _view_loops(tensor: torch.Tensor, start: int, loops: Sequence[Loop], side: int) -> torch.Tensor:
    sizes, strides = [loop[0] for loop in loops], [loop[side] for loop in loops]
    return tensor.as_strided(sizes, strides, tensor.storage_offset() + start)


def _find_transposition(loops: Sequence[Loop]) -> tuple[Loop, Loop, list[Loop]] | None:
    """Return the dense loops of source and target, and the others.

    None unless both are long and different; blocks gain nothing otherwise.
    """
    inner = next((loop for loop in loops if loop[1] == 1), None)
    outer = next((loop for loop in loops if loop[2] == 1), None)
    if inner is None or outer is None or inner is outer or min(inner[0], outer[0]) < SIDE // 16:
        return None
    return inner, outer, [loop for loop in loops if loop is not inner and loop is not outer]


def _transpose(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy the transpose of ``source``; rows of both are dense.

    torch transposes fast between dense blocks, so each block is made dense first.
    """
    rows, columns = source.shape
    # Two blocks in the second-level cache: dense rows of the source, and their transpose.
    width = BLOCK // (SIDE * source.itemsize)
    room = source.new_empty(2, SIDE * width)
    for i in range(0, rows, SIDE):
        for j in range(0, columns, width):
            part = source[i : i + SIDE, j : j + width]
            block = room[0, : part.numel()].view(part.shape).copy_(part)
            turned = room[1, : part.numel()].view(part.shape[::-1]).copy_(block.t())
            target[j : j + width, i : i + SIDE].copy_(turned)
