"""Save to an object store: one rank uploads each file."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from zerostart.checkpoint.storage.upload import ObjectWriter, StoreDirectory
from zerostart.checkpoint.write.shards import SaveLayout
from zerostart.checkpoint.write.store import StoreStaging
from zerostart.distributed.world import World
from zerostart.errors import CheckpointError, ConfigError
from zerostart.transfer.planning.writes import Write, WritePlan
from zerostart.transfer.writing import OnWrite, Source, write_out

#: Part of a file that a rank assembles and uploads at once, in bytes.
WINDOW_BYTES = 4 << 20
#: Size of one write, a divisor of the window, and threshold of one message, in bytes.
WRITE_BYTES, SENT_BYTES = 1 << 20, 3 << 20
#: Threads that assemble windows, and host memory of a rank's save, in bytes.
THREADS, MEMORY_BYTES = 2, 64 << 20
_Bytes = npt.NDArray[np.uint8]


class StorePlace:
    """A directory of an object store; rank 0 has its ``staging``."""

    def __init__(self, store: StoreDirectory, staging: StoreStaging | None) -> None:
        self.name = store.url
        self._store, self._staging = store, staging
        self.directory = Path() if staging is None else staging.directory

    def check_visible(self, world: World) -> None:
        """Do nothing: the first request fails on a rank that cannot reach the store."""

    def output(self, folder: str, layout: SaveLayout) -> StoreOutput:
        """Return the writer of the files of ``layout`` in ``folder``."""
        return StoreOutput(self._store, self._staging, folder, layout)


@dataclass(frozen=True)
class _Window:
    """A range of bytes of one file."""

    file: int
    begin: int
    end: int


class StoreOutput:
    """Uploads the files of one layout; the methods are those of ``FileOutput``."""

    page = WRITE_BYTES

    def __init__(
        self, store: StoreDirectory, staging: StoreStaging | None, folder: str, layout: SaveLayout
    ) -> None:
        self._store, self._staging, self._folder, self._layout = store, staging, folder, layout

    def choose_chunk(self, memory_limit: int | None) -> tuple[int, int]:
        if memory_limit is not None and memory_limit < MEMORY_BYTES:
            raise ConfigError(
                f"memory_limit={memory_limit}: a save to a store takes {MEMORY_BYTES} bytes of host memory"
            )
        return WRITE_BYTES, THREADS

    def begin(self) -> list[str]:
        assert self._staging is not None, "rank 0 has it"
        return self._staging.begin_files(self._folder, self._layout)

    def write(
        self,
        names: Any,
        plan: WritePlan,
        storages: Sequence[Source],
        threads: int,
        observer: OnWrite,
        world: World,
    ) -> None:
        layout = self._layout
        windows = _plan_windows(layout, world)
        first = {
            window.file: number
            for number, current in enumerate(windows)
            for window in current
            if window is not None and window.begin == 0
        }
        rounds: dict[int, list[Write]] = {}
        for write in plan.writes:
            file, offset = _locate(layout, write.name, write.first * write.dtype.itemsize)
            rounds.setdefault(first[file] + offset // WINDOW_BYTES, []).append(write)
        batches = {number: list(_split_batches(layout, writes, world)) for number, writes in rounds.items()}
        own = np.array([len(batches.get(number, ())) for number in range(len(windows))], np.int64)
        steps = np.max(np.stack(world.all_gather_object(own, "counting what the ranks send")), axis=0)
        writer = None
        for number, current in enumerate(windows):
            window = current[world.rank]
            router = _Router(layout, window, world)
            mine = batches.get(number, [])
            for step in range(int(steps[number])):
                now = replace(plan, writes=tuple(mine[step] if step < len(mine) else ()))
                write_out(now, storages, router, threads, observer)
                for message in world.exchange(router.messages(), "sending bytes to the ranks that upload"):
                    router.receive(message)
            if window is None:
                continue
            whole, name = layout.files[window.file], names[window.file]
            router.check(whole.name)
            if window.begin == 0:
                writer = ObjectWriter(self._store, name, whole.size)
            assert writer is not None, "the first window opens it"
            writer.write(router.window)
            is_last = window.end == whole.size
            if is_last and not (self._staging is not None and self._staging.hold(name, writer)):
                writer.close()

    def commit(self, world: World) -> None:
        """Do nothing: each rank has completed its uploads."""

    def discard(self) -> None:
        """Do nothing: rank 0 deletes the uploads."""


def _plan_windows(layout: SaveLayout, world: World) -> list[list[_Window | None]]:
    own: list[list[_Window]] = [[] for _ in range(world.size)]
    for number, file in enumerate(layout.files):
        for begin in range(0, file.size, WINDOW_BYTES):
            own[number % world.size].append(_Window(number, begin, min(file.size, begin + WINDOW_BYTES)))
    return [list(windows) for windows in itertools.zip_longest(*own)]


def _locate(layout: SaveLayout, name: str, offset: int) -> tuple[int, int]:
    """Return the file of byte ``offset`` of a tensor, and the offset there."""
    entry = layout.tensors[name]
    return entry.file, entry.offset + offset


def _split_batches(layout: SaveLayout, writes: Sequence[Write], world: World) -> Iterator[list[Write]]:
    batch: list[Write] = []
    sent_bytes = 0
    for write in writes:
        if layout.tensors[write.name].file % world.size != world.rank:
            sent_bytes += write.nbytes
        batch.append(write)
        if sent_bytes >= SENT_BYTES:
            yield batch
            batch, sent_bytes = [], 0
    if batch:
        yield batch


class _Router:
    """Writer that fills the window of this rank and packs bytes for others.

    See ``transfer.writing``. A message has the number of its entries, the entries, and their bytes. An entry
    is four 64-bit integers: offset in the window, length, distance and number of rows.
    """

    def __init__(self, layout: SaveLayout, window: _Window | None, world: World) -> None:
        self._layout, self._world, self._lock = layout, world, threading.Lock()
        self.window = bytearray(0 if window is None else window.end - window.begin)
        self._bytes = np.frombuffer(self.window, np.uint8)
        self._filled = 0
        self._clear()
        if window is not None:
            header = layout.files[window.file].header[window.begin : window.end]
            self.window[: len(header)] = header
            self._filled = len(header)

    def _clear(self) -> None:
        self._entries: list[list[tuple[int, int, int, int]]] = [[] for _ in range(self._world.size)]
        self._data: list[list[_Bytes]] = [[] for _ in range(self._world.size)]

    def lead(self, name: str, offset: int) -> int:
        return 0

    def goes_round(self, nbytes: int) -> bool:
        return False

    def write_rows(self, name: str, data: memoryview, offset: int, length: int, step: int, rows: int) -> None:
        file, place = _locate(self._layout, name, offset)
        at, owner = place % WINDOW_BYTES, file % self._world.size
        source = _view_rows(np.frombuffer(data, np.uint8), length, step, rows)
        with self._lock:
            if owner == self._world.rank:
                self._fill(at, length, step, rows, source)
            else:
                self._entries[owner].append((at, length, step, rows))
                self._data[owner].append(source.reshape(-1).copy())

    def _fill(self, at: int, length: int, step: int, rows: int, source: _Bytes) -> None:
        _view_rows(self._bytes[at:], length, step, rows)[...] = source
        self._filled += length * rows

    def messages(self) -> list[torch.Tensor]:
        """Return the message for each rank, empty if there is nothing to send."""
        messages_by_rank = []
        for entries, data in zip(self._entries, self._data, strict=True):
            head = np.array([len(entries), *(n for entry in entries for n in entry)], np.int64)
            whole = np.concatenate([head.view(np.uint8), *data]) if entries else np.empty(0, np.uint8)
            data.clear()
            messages_by_rank.append(torch.from_numpy(whole))
        self._clear()
        return messages_by_rank

    def receive(self, message: torch.Tensor) -> None:
        """Copy the bytes of a message into the window."""
        data = message.numpy()
        count = int(data[:8].copy().view(np.int64)[0]) if data.size else 0
        entries = data[8 : 8 + 32 * count].copy().view(np.int64).reshape(count, 4)
        at = 8 + 32 * count
        for begin, length, step, rows in entries.tolist():
            self._fill(begin, length, step, rows, data[at : at + length * rows].reshape(rows, length))
            at += length * rows

    def check(self, name: str) -> None:
        """Raise CheckpointError unless the ranks have written each byte of the window once."""
        if self._filled != len(self.window):
            raise CheckpointError(
                f"{name}: the ranks have {self._filled} of {len(self.window)} bytes of a part of this file; "
                "this is a bug in zerostart"
            )


def _view_rows(data: _Bytes, length: int, step: int, rows: int) -> _Bytes:
    if (rows - 1) * step + length > data.size:
        raise CheckpointError("rows of a window end behind it; this is a bug in zerostart")
    return np.lib.stride_tricks.as_strided(data, (rows, length), (step if rows > 1 else length, 1))
