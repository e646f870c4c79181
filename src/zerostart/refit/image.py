"""The image: the safetensors file that a save of the model would write, as the address space of a refit.

Trainer ranks know where in it their shards are, by the plan of a save. Workers know which of its bytes fill
their parameters, by the plan of a load. So neither knows how the other is sharded. The file need not exist.
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
#: By tensor the lanes of its digest over the elements of a set, and how many they are.
Sums = Mapping[str, Sequence[int]]
#: The one file of an image.
FILE = "model.safetensors"
#: An image in memory can neither shrink nor grow: a missing page would end who reads it.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True)
class Image:
    """Names, dtypes, shapes and places of the tensors of a safetensors file, its header included."""

    #: In the order of the trainer's checkpoint, in which a loader gets them.
    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Image:
        """Make the image of ``entries``; raise ConfigError for more tensors than one file takes."""
        image = cls(tuple((name, dtype, tuple(shape)) for name, dtype, shape in entries))
        if len(image.layout.files) != 1:
            raise ConfigError(f"the model has {len(image.entries)} tensors, more than a refit can address")
        return image

    @cached_property
    def layout(self) -> SaveLayout:
        """The place of every byte."""
        return plan_shards(self.entries, 1 << 62, FILE.removesuffix(".safetensors"))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return self.layout.files[0].size

    def catalog(self) -> Catalog:
        """Return the tensors as those of a checkpoint, whose storage cannot be read."""
        tensors = {name: self.layout.tensors[name] for name, _, _ in self.entries}
        return Catalog("", _NoStorage((FILE,), (self.nbytes,)), tensors)

    def sum_rows(
        self, runs: Runs, digests: Digests, rows_at: Callable[[int, int, int, int], torch.Tensor]
    ) -> None:
        """Add the elements of ``runs``; ``rows_at`` gives bytes by start, width, stride and number."""
        for entry, part in self._parts(runs):
            dtype = torch_dtype(entry.dtype, entry.name)
            for start, width, stride, count in part.rows.tolist():
                # As elements, so that rows that begin at the same place of a digest's are summed together.
                data = rows_at(start, width, stride, count).view(dtype)
                first, step = start - entry.offset, stride or width
                digests.add_rows(entry.name, first // dtype.itemsize, step // dtype.itemsize, data)

    def entries_in(self, runs: Runs) -> list[Entry]:
        """Return the tensors that ``runs`` has bytes of."""
        return [(entry.name, entry.dtype, entry.shape) for entry, _ in self._parts(runs)]

    @cached_property
    def _in_order(self) -> tuple[list[TensorEntry], list[int]]:
        found = sorted((e for e in self.layout.tensors.values() if e.nbytes), key=lambda entry: entry.offset)
        return found, [entry.offset for entry in found]

    def _parts(self, runs: Runs) -> Iterator[tuple[TensorEntry, Runs]]:
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
        """Raise ReadError: nothing is stored."""
        raise ReadError("an image has no bytes of its own")


class ImagePart(Reader):
    """Bytes of an image in memory, from byte ``low`` on: a writer and a reader of it."""

    def __init__(self, layout: SaveLayout, low: int, data: torch.Tensor) -> None:
        """``data`` begins with the multiple of 64 bytes before ``low``, so that elements are aligned."""
        self._tensors = layout.tensors
        self.low, self._base, self._data = low, low - low % 64, data

    def rows(self, start: int, width: int, stride: int, count: int) -> torch.Tensor:
        """Return a view of rows of bytes, [count, width]."""
        return self._data.as_strided((count, width), (stride or width, 1), start - self._base)

    def elements(self, write: Write) -> torch.Tensor:
        """Return a view of the span of a write, 1-D."""
        width = write.dtype.itemsize
        begin = self._tensors[write.name].offset + write.first * width - self._base
        return self._data[begin : begin + write.span * width].view(write.dtype)

    def read(self, file: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Copy bytes out of the memory."""
        for buffer in buffers:
            move_bytes(torch.frombuffer(buffer, dtype=torch.uint8), self.rows(offset, len(buffer), 0, 1)[0])
            offset += len(buffer)

    def gather(self, file: int, offset: int, rows: Rows, target: memoryview, step: int) -> None:
        """Copy rows out of the memory."""
        view = torch.frombuffer(target, dtype=torch.uint8).as_strided((rows.count, rows.width), (step, 1))
        view.copy_(self.rows(offset, rows.width, rows.stride, rows.count))

    def lead(self, name: str, offset: int) -> int:
        """Return 0: pages mean nothing here."""
        return 0

    def goes_round(self, nbytes: int) -> bool:
        """Return False: there is no page cache."""
        return False

    def write_rows(self, name: str, data: memoryview, offset: int, length: int, step: int, rows: int) -> None:
        """Copy ``rows`` of ``length`` bytes, ``step`` apart, to byte ``offset`` of a tensor and on."""
        given, place = torch.frombuffer(data, dtype=torch.uint8), self._tensors[name].offset + offset
        if rows == 1 or step == length:
            move_bytes(self.rows(place, length * rows, 0, 1)[0], given[: length * rows])
        else:
            self.rows(place, length, step, rows).copy_(given.as_strided((rows, length), (step, 1)))


class SetSums:
    """The digest sums of several sets of an image's elements, over what a rank has of each.

    A sum over some elements of a tensor counts their places in it, and sums of disjoint sets add up. So
    trainer ranks sum what they have of a worker's elements, the worker sums what its parameters hold, and the
    two agree if each element arrived with its bits.
    """

    def __init__(self, image: Image, sets: Sequence[Runs]) -> None:
        self._image, self._sets = image, sets
        #: Each push writes the same rows, so where they meet the sets is computed once.
        self._met = cache(lambda *row: [*self._meet(*row)])
        self.begin()

    def begin(self) -> None:
        """Forget what was added."""
        self._digests = [Digests(self._image.entries_in(runs)) for runs in self._sets]

    def add_rows(self, name: str, first: int, step: int, data: torch.Tensor) -> None:
        """Add rows of a tensor, as ``Digests.add_rows``; called from several threads."""
        rows, count = data.shape
        for number, low, wide, apart, many in self._met(name, first, step, rows, count):
            part = data.as_strided((many, wide), (apart, 1), int(data.storage_offset()) + low)
            self._digests[number].add_rows(name, first + low, apart, part)

    def _meet(
        self, name: str, first: int, step: int, rows: int, count: int
    ) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield by set the element, elements, distance and rows that it has of the rows of a write."""
        entry = self._image.layout.tensors[name]
        size = DTYPE_BITS[entry.dtype] // 8
        begin = entry.offset + first * size
        mine = Runs.of([(begin, count * size, step * size, rows)])
        for number, wanted in enumerate(self._sets):
            for start, width, stride, many in wanted.intersect(mine).rows.tolist():
                yield number, (start - begin) // size, width // size, (stride or width) // size, many

    def summed(self, world: Ranks | None) -> list[dict[str, tuple[int, ...]]]:
        """Return the sums of each set over all ranks; collective, one reduction for each set.

        Raises CheckpointError if the ranks together have not every element of a set.
        """
        found = []
        for runs, digests in zip(self._sets, self._digests, strict=True):
            sums = digests.sums(world)
            dtypes = {name: self._image.layout.tensors[name].dtype for name in sums}
            added = sum(row[-1] * DTYPE_BITS[dtypes[name]] // 8 for name, row in sums.items())
            if added != runs.nbytes:
                raise CheckpointError(
                    f"{added} bytes were summed up of {runs.nbytes} that workers take; this is a bug in "
                    f"zerostart"
                )
            found.append(sums)
        return found


def differing(expected: Sums, found: Sums) -> list[str]:
    """Return the names of the tensors whose sums differ."""
    names = dict.fromkeys([*expected, *found])
    return [name for name in names if list(expected.get(name, ())) != list(found.get(name, ()))]


def digest_of(sums: Sums) -> str:
    """Return one digest over the sums of a set."""
    text = repr(sorted((name, *row) for name, row in sums.items()))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def make_memory(image: Image) -> int:
    """Make an anonymous file for an image, with all its memory; return its descriptor. Raises WriteError.

    Other processes get the descriptor over the control wire. The file ends with the last of them.
    """
    descriptor = os.memfd_create("zerostart-refit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # All of it at once: a page that is missing later would end the process that writes to it.
        os.posix_fallocate(descriptor, 0, image.nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(descriptor)
        raise WriteError(
            f"{image.nbytes} bytes of shared memory for the weights cannot be had: {error.strerror}; free "
            "memory, or use zerostart.weight_source"
        ) from error
    return descriptor


class SharedImage:
    """The mapping of an image's memory in this process."""

    def __init__(self, image: Image, descriptor: int) -> None:
        """Map the file, and close its ``descriptor``. Raises ReadError if it is not the image's."""
        if descriptor < 0:
            raise ReadError("the image of the weights came without its memory")
        try:
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            if not sealed or os.fstat(descriptor).st_size != image.nbytes:
                raise ReadError(f"the memory of the weights is not the image of {image.nbytes} bytes")
            self._memory = mmap.mmap(descriptor, image.nbytes)
        finally:
            os.close(descriptor)
        self.part = ImagePart(image.layout, 0, torch.frombuffer(self._memory, dtype=torch.uint8))

    def fill(self, plan: Plan, storages: Sequence[torch.Tensor]) -> None:
        """Fill ``storages``, one for each destination of ``plan``."""
        execute(plan, storages, Progress(0, False), push_threads(), self.part)

    def sum(self, image: Image, runs: Runs, digests: Digests) -> None:
        """Add the elements of ``runs`` to ``digests``."""
        image.sum_rows(runs, digests, self.part.rows)

    def close(self) -> None:
        """Unmap the memory, with the last reference to it."""
        del self.part, self._memory


class Runs:
    """A set of bytes of an image: disjoint spans from ``low`` up to ``high``, in ascending order."""

    def __init__(self, low: Numbers, high: Numbers) -> None:
        self.low, self.high = low, high

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]] | Numbers) -> Runs:
        """Make the set of any rows ``start, width, stride, count``, which may overlap."""
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
    def of_reads(cls, plan: Plan) -> Runs:
        """Make the set of bytes that ``plan`` reads of its one file."""
        return cls.of([(r.offset, r.nbytes // r.rows, r.stride, r.rows) for r in plan.all_reads()])

    @classmethod
    def of_writes(cls, plan: WritePlan, layout: SaveLayout) -> Runs:
        """Make the set of bytes that ``plan`` writes of the one file of ``layout``."""
        found = []
        for write in plan.writes:
            width = write.dtype.itemsize
            starts, lengths = write.runs()
            rows = np.ones((len(starts), 4), np.int64)
            rows[:, 0] = layout.tensors[write.name].offset + (write.first + starts) * width
            rows[:, 1] = lengths * width
            found.append(rows)
        return cls.of(np.concatenate(found) if found else [])

    @cached_property
    def rows(self) -> Numbers:
        """Rows ``start, width, stride, count``: three or more spans of one width at one distance are one."""
        rows = np.stack([self.low, self.high - self.low, np.zeros_like(self.low), np.ones_like(self.low)], 1)
        if len(rows) < 3:
            return rows
        step, alike = np.diff(self.low), rows[1:, 1] == rows[:-1, 1]
        # Link n is between the spans n and n + 1. It joins them if the link before or behind is the same.
        same = alike[1:] & alike[:-1] & (step[1:] == step[:-1])
        joins = np.append(same, False) | np.append(False, same)
        # A span where one distance ends and another begins belongs to the row before it.
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
        """One past the last byte; 0 for the empty set."""
        return int(self.high[-1]) if len(self.high) else 0

    def intersect(self, other: Runs) -> Runs:
        """Return the bytes of both."""
        first = np.searchsorted(self.high, other.low, "right")
        stop = np.searchsorted(self.low, other.high, "left")
        theirs, number = _numbered(np.maximum(stop - first, 0))
        mine = first[theirs] + number
        return Runs(
            np.maximum(self.low[mine], other.low[theirs]), np.minimum(self.high[mine], other.high[theirs])
        )

    def minus(self, other: Runs) -> Runs:
        """Return the bytes of this set that are not in the other."""
        low, high = np.append(0, other.high), np.append(other.low, max(self.end, other.end))
        return self.intersect(Runs(low[low < high], high[low < high]))

    def within(self, low: int, high: int) -> Runs:
        """Return the bytes from ``low`` up to ``high``."""
        return self.intersect(Runs.of([(low, max(0, high - low), 0, 1)]))


def _numbered(counts: Numbers) -> tuple[Numbers, Numbers]:
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
