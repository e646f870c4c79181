"""Image of a refit: the safetensors file that a save of the model would write.

Its byte offsets are the addresses of a push. Trainer ranks place their shards in it by a save plan. Workers
read their parameters from it by a load plan. So neither side knows how the other is sharded. The file need
not exist.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import torch

from zerostart.checkpoint.catalog import DTYPE_BITS, Catalog, TensorEntry
from zerostart.checkpoint.digest import Digests, Ranks
from zerostart.checkpoint.memory import move_bytes
from zerostart.checkpoint.storage import Reader, Rows, Storage
from zerostart.checkpoint.write.shards import SaveLayout, plan_shards
from zerostart.errors import CheckpointError, ConfigError, ReadError, WriteError
from zerostart.recipe import torch_dtype
from zerostart.transfer.execute import Progress, execute
from zerostart.transfer.planning.plan import Plan
from zerostart.transfer.planning.writes import Write, WritePlan
from zerostart.transfer.tuning import push_threads

#: Name, dtype in safetensors' spelling, and shape of a tensor.
Entry = tuple[str, str, Sequence[int]]
Numbers = npt.NDArray[np.int64]
#: For each tensor: lanes of its digest sum over the elements of a set, and their number.
Sums = Mapping[str, Sequence[int]]
#: Name of the image's file.
FILE = "model.safetensors"
#: Shared memory must not shrink: reading a missing page kills the reader.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True)
class Image:
    """Names, dtypes, shapes and offsets of the tensors of one safetensors file."""

    #: Tensors in checkpoint order, the order in which a loader receives them.
    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Image:
        """Lay out ``entries`` in one file; raise ConfigError for too many tensors."""
        image = cls(tuple((name, dtype, tuple(shape)) for name, dtype, shape in entries))
        if len(image.layout.files) != 1:
            raise ConfigError(f"the model has {len(image.entries)} tensors, too many for one refit")
        return image

    @cached_property
    def layout(self) -> SaveLayout:
        """Offset of every tensor."""
        return plan_shards(self.entries, 1 << 62, FILE.removesuffix(".safetensors"))

    @property
    def nbytes(self) -> int:
        """Size of the file, in bytes."""
        return self.layout.files[0].size

    def catalog(self) -> Catalog:
        """Return a catalog of the tensors, whose bytes cannot be read."""
        tensors = {name: self.layout.tensors[name] for name, _, _ in self.entries}
        return Catalog("", _NoStorage((FILE,), (self.nbytes,)), tensors)

    def sum_rows(
        self, runs: ByteSet, digests: Digests, rows_at: Callable[[int, int, int, int], torch.Tensor]
    ) -> None:
        """Add the elements in ``runs`` to ``digests``.

        ``rows_at`` returns bytes, [count, width], for a start, width, stride and count.
        """
        for entry, part in self._parts(runs):
            dtype = torch_dtype(entry.dtype, entry.name)
            for start, width, stride, count in part.rows.tolist():
                # The digest groups rows by elements, not by bytes.
                data = rows_at(start, width, stride, count).view(dtype)
                first, step = start - entry.offset, stride or width
                digests.add_rows(entry.name, first // dtype.itemsize, step // dtype.itemsize, data)

    def entries_in(self, runs: ByteSet) -> list[Entry]:
        """List the tensors that have bytes in ``runs``."""
        return [(entry.name, entry.dtype, entry.shape) for entry, _ in self._parts(runs)]

    @cached_property
    def _in_order(self) -> tuple[list[TensorEntry], list[int]]:
        entries = sorted((e for e in self.layout.tensors.values() if e.nbytes), key=lambda e: e.offset)
        return entries, [entry.offset for entry in entries]

    def _parts(self, runs: ByteSet) -> Iterator[tuple[TensorEntry, ByteSet]]:
        if not runs.nbytes:
            return
        entries, offsets = self._in_order
        first, stop = bisect_right(offsets, int(runs.low[0])) - 1, bisect_left(offsets, runs.end)
        for entry in entries[first:stop]:
            part = runs.within(entry.offset, entry.offset + entry.nbytes)
            if part.nbytes:
                yield entry, part


@dataclass(frozen=True)
class _NoStorage(Storage):
    def reader(self, *, cold: bool = False, direct: bool = False) -> NoReturn:
        """Raise ReadError: there is nothing to read."""
        raise ReadError("an image has no bytes of its own")


class ImagePart(Reader):
    """Part of an image in memory, readable and writable, that begins at byte ``low``."""

    def __init__(self, layout: SaveLayout, low: int, data: torch.Tensor) -> None:
        """Wrap ``data``, whose first byte is ``low`` rounded down to a multiple of 64."""
        self._tensors = layout.tensors
        self.low, self._base, self._data = low, low - low % 64, data

    def rows(self, start: int, width: int, stride: int, count: int) -> torch.Tensor:
        """Return a view of rows of bytes, [count, width]."""
        return self._data.as_strided((count, width), (stride or width, 1), start - self._base)

    def elements(self, write: Write) -> torch.Tensor:
        """Return a 1-D view of the span of a write."""
        width = write.dtype.itemsize
        begin = self._tensors[write.name].offset + write.first * width - self._base
        return self._data[begin : begin + write.span * width].view(write.dtype)

    def read(self, file: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Copy consecutive bytes into ``buffers``."""
        for buffer in buffers:
            move_bytes(torch.frombuffer(buffer, dtype=torch.uint8), self.rows(offset, len(buffer), 0, 1)[0])
            offset += len(buffer)

    def gather(self, file: int, offset: int, rows: Rows, target: memoryview, step: int) -> None:
        """Copy rows into ``target``."""
        view = torch.frombuffer(target, dtype=torch.uint8).as_strided((rows.count, rows.width), (step, 1))
        view.copy_(self.rows(offset, rows.width, rows.stride, rows.count))

    def lead(self, name: str, offset: int) -> int:
        """Return 0: memory needs no page alignment."""
        return 0

    def goes_round(self, nbytes: int) -> bool:
        """Return False: there is no page cache."""
        return False

    def write_rows(self, name: str, data: memoryview, offset: int, length: int, step: int, rows: int) -> None:
        """Copy ``rows`` of ``length`` bytes, ``step`` apart, to byte ``offset`` of a tensor."""
        source, place = torch.frombuffer(data, dtype=torch.uint8), self._tensors[name].offset + offset
        if rows == 1 or step == length:
            move_bytes(self.rows(place, length * rows, 0, 1)[0], source[: length * rows])
        else:
            self.rows(place, length, step, rows).copy_(source.as_strided((rows, length), (step, 1)))


class SetDigests:
    """Digest sums over several sets of an image's elements.

    A sum weighs each element by its position in the tensor, and sums of disjoint sets add up. Trainer ranks
    sum their shares of a worker's elements, the worker sums its parameters, and the two agree if every
    element arrived unchanged.
    """

    def __init__(self, image: Image, sets: Sequence[ByteSet]) -> None:
        self._image, self._sets = image, sets
        #: Every push writes the same rows: compute their overlap with the sets once.
        self._met = cache(lambda *row: [*self._meet(*row)])
        self.begin()

    def begin(self) -> None:
        """Start again from zero."""
        self._digests = [Digests(self._image.entries_in(runs)) for runs in self._sets]

    def add_rows(self, name: str, first: int, step: int, data: torch.Tensor) -> None:
        """Add rows of a tensor, as ``Digests.add_rows`` does; safe to call from several threads."""
        rows, count = data.shape
        for number, low, wide, apart, many in self._met(name, first, step, rows, count):
            part = data.as_strided((many, wide), (apart, 1), int(data.storage_offset()) + low)
            self._digests[number].add_rows(name, first + low, apart, part)

    def _meet(
        self, name: str, first: int, step: int, rows: int, count: int
    ) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield where rows of a write overlap each set: set, element, count, distance, rows."""
        entry = self._image.layout.tensors[name]
        size = DTYPE_BITS[entry.dtype] // 8
        begin = entry.offset + first * size
        mine = ByteSet.of([(begin, count * size, step * size, rows)])
        for number, wanted in enumerate(self._sets):
            for start, width, stride, many in wanted.intersect(mine).rows.tolist():
                yield number, (start - begin) // size, width // size, (stride or width) // size, many

    def summed(self, world: Ranks | None) -> list[dict[str, tuple[int, ...]]]:
        """Return the sums of each set over all ranks; collective.

        There is one reduction for each set. Raises CheckpointError if elements of a set are missing.
        """
        sums_by_set = []
        for runs, digests in zip(self._sets, self._digests, strict=True):
            sums = digests.sums(world)
            dtypes = {name: self._image.layout.tensors[name].dtype for name in sums}
            added = sum(row[-1] * DTYPE_BITS[dtypes[name]] // 8 for name, row in sums.items())
            if added != runs.nbytes:
                raise CheckpointError(
                    f"the ranks summed {added} of {runs.nbytes} bytes that workers read; this is a bug in "
                    "zerostart"
                )
            sums_by_set.append(sums)
        return sums_by_set


def find_differences(expected: Sums, actual: Sums) -> list[str]:
    """List the tensors whose sums differ."""
    names = dict.fromkeys([*expected, *actual])
    return [name for name in names if list(expected.get(name, ())) != list(actual.get(name, ()))]


def combine_sums(sums: Sums) -> str:
    """Return one digest of all sums."""
    text = repr(sorted((name, *row) for name, row in sums.items()))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def make_memory(image: Image) -> int:
    """Allocate an anonymous file for an image; return its descriptor, or raise WriteError.

    Other processes receive the descriptor over the control wire. The kernel deletes the file after the last
    close.
    """
    descriptor = os.memfd_create("zerostart-refit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Allocate every page now: writing to a missing page later kills the process.
        os.posix_fallocate(descriptor, 0, image.nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(descriptor)
        raise WriteError(
            f"cannot allocate {image.nbytes} bytes of shared memory for the weights: {error.strerror}; free "
            "memory, or use zerostart.weight_source"
        ) from error
    return descriptor


class SharedImage:
    """Mapping of an image's shared memory into this process."""

    def __init__(self, image: Image, descriptor: int) -> None:
        """Map the file and close ``descriptor``; raise ReadError if it does not fit."""
        if descriptor < 0:
            raise ReadError("the trainer sent no shared memory for the weights")
        try:
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            if not sealed or os.fstat(descriptor).st_size != image.nbytes:
                raise ReadError(f"the shared memory is not an image of {image.nbytes} bytes")
            self._memory = mmap.mmap(descriptor, image.nbytes)
        finally:
            os.close(descriptor)
        self.part = ImagePart(image.layout, 0, torch.frombuffer(self._memory, dtype=torch.uint8))

    def fill(self, plan: Plan, storages: Sequence[torch.Tensor]) -> None:
        """Fill ``storages``, one for each destination of ``plan``."""
        execute(plan, storages, Progress(0, False), push_threads(), self.part)

    def sum(self, image: Image, runs: ByteSet, digests: Digests) -> None:
        """Add the elements in ``runs`` to ``digests``."""
        image.sum_rows(runs, digests, self.part.rows)

    def close(self) -> None:
        """Unmap the memory."""
        del self.part, self._memory


class ByteSet:
    """Set of bytes of an image: disjoint spans [low, high) in ascending order."""

    def __init__(self, low: Numbers, high: Numbers) -> None:
        self.low, self.high = low, high

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]] | Numbers) -> ByteSet:
        """Build a set from rows (start, width, stride, count), which may overlap."""
        if not isinstance(rows, np.ndarray):
            rows = np.array(list(rows), np.int64)
        start, width, stride, count = rows.reshape(-1, 4).astype(np.int64, copy=False).T
        count = np.where(width > 0, count, 0)
        row, number = _numbered(count)
        low = start[row] + number * stride[row]
        order = np.argsort(low, kind="stable")
        low, high = low[order], np.maximum.accumulate((low + width[row])[order])
        first = np.flatnonzero(np.append(True, low[1:] > high[:-1])[: len(low)])
        return cls(low[first], np.maximum.reduceat(high, first) if len(first) else high)

    @classmethod
    def of_reads(cls, plan: Plan) -> ByteSet:
        """Return the bytes that ``plan`` reads."""
        return cls.of([(r.offset, r.nbytes // r.rows, r.stride, r.rows) for r in plan.all_reads()])

    @classmethod
    def of_writes(cls, plan: WritePlan, layout: SaveLayout) -> ByteSet:
        """Return the bytes that ``plan`` writes into the file of ``layout``."""
        parts = []
        for write in plan.writes:
            width = write.dtype.itemsize
            starts, lengths = write.runs()
            rows = np.ones((len(starts), 4), np.int64)
            rows[:, 0] = layout.tensors[write.name].offset + (write.first + starts) * width
            rows[:, 1] = lengths * width
            parts.append(rows)
        return cls.of(np.concatenate(parts) if parts else [])

    @cached_property
    def rows(self) -> Numbers:
        """Rows (start, width, stride, count); equal spans at one distance form one row."""
        rows = np.stack([self.low, self.high - self.low, np.zeros_like(self.low), np.ones_like(self.low)], 1)
        if len(rows) < 3:
            return rows
        step, alike = np.diff(self.low), rows[1:, 1] == rows[:-1, 1]
        # Link n connects spans n and n + 1. It joins them if the previous or next link has the same distance.
        same = alike[1:] & alike[:-1] & (step[1:] == step[:-1])
        joins = np.append(same, False) | np.append(False, same)
        # A span between two distances belongs to the row before it.
        joins[1:] &= ~(joins[:-1] & ~same)
        first = np.flatnonzero(np.append(True, ~joins))
        count = np.diff(first, append=len(rows))
        rows = rows[first]
        rows[:, 2], rows[:, 3] = np.where(count > 1, np.append(step, 0)[first], 0), count
        return rows

    @cached_property
    def nbytes(self) -> int:
        """Number of bytes in the set."""
        return int((self.high - self.low).sum())

    @property
    def end(self) -> int:
        """End of the last span; 0 for the empty set."""
        return int(self.high[-1]) if len(self.high) else 0

    def intersect(self, other: ByteSet) -> ByteSet:
        """Return the bytes in both sets."""
        first = np.searchsorted(self.high, other.low, "right")
        stop = np.searchsorted(self.low, other.high, "left")
        theirs, number = _numbered(np.maximum(stop - first, 0))
        mine = first[theirs] + number
        return ByteSet(
            np.maximum(self.low[mine], other.low[theirs]), np.minimum(self.high[mine], other.high[theirs])
        )

    def minus(self, other: ByteSet) -> ByteSet:
        """Return the bytes that are not in ``other``."""
        low, high = np.append(0, other.high), np.append(other.low, max(self.end, other.end))
        return self.intersect(ByteSet(low[low < high], high[low < high]))

    def within(self, low: int, high: int) -> ByteSet:
        """Return the bytes in [low, high)."""
        return self.intersect(ByteSet.of([(low, max(0, high - low), 0, 1)]))


def _numbered(counts: Numbers) -> tuple[Numbers, Numbers]:
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
