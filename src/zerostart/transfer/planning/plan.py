"""Plans as plain data, which can be printed, summed, compared and run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from zerostart.checkpoint.catalog import TensorEntry
from zerostart.checkpoint.storage import Storage
from zerostart.geometry import Box, Copy, Loop, is_one_run
from zerostart.recipe import Computed, torch_dtype

#: An operand: index of its register, its shape, and its strides in elements (None for row-major).
OperandView = tuple[int, tuple[int, ...], tuple[int, ...] | None]


@dataclass(frozen=True, slots=True)
class Destination:
    """Local storage that the plan fills."""

    name: str
    #: Number of elements, padding included.
    numel: int
    #: Number of elements before the padding.
    owned: int
    dtype: torch.dtype
    #: True for host memory, where reads can land without a staging buffer.
    direct: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the storage, padding included."""
        return self.numel * self.dtype.itemsize


class Part(NamedTuple):
    """Destination of some elements of a read."""

    #: Offset of the first element in the read, in bytes.
    at: int
    #: Dtype of the stored elements.
    dtype: torch.dtype
    #: Index of the destination.
    target: int
    #: Index of the first element in the destination.
    to: int
    #: Loops of (size, source stride, destination stride), in elements.
    loops: tuple[tuple[int, int, int], ...]
    #: True if it is one run without a cast into a direct destination, so it can be read into place.
    direct: bool

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the last source element."""
        return _span(self.loops) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Read:
    """One positioned read."""

    #: Index of the file.
    file: int
    #: Offset in the file, in bytes.
    offset: int
    #: Bytes read, without the gaps between rows.
    nbytes: int
    #: Destinations; exactly one if there are rows.
    parts: tuple[Part, ...]
    #: True if it is read into its parts, which cover it; otherwise into a staging buffer.
    direct: bool
    #: Number of runs of equal length at equal distances; gaps between them are not read.
    rows: int = 1
    #: Bytes between the starts of two rows; 0 for one row.
    stride: int = 0

    @property
    def end(self) -> int:
        """Offset after the last byte."""
        return self.offset + (self.rows - 1) * self.stride + self.nbytes // self.rows


@dataclass(frozen=True, slots=True)
class ComputeStep:
    """Evaluation of a box of a computed tensor."""

    source: Computed
    #: Factors into which each dimension of ``source`` is split.
    factors: tuple[tuple[int, ...], ...]
    #: Box in the split shape to compute.
    box: Box
    #: Memory of each operand.
    operands: tuple[OperandView, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Computation:
    """Steps that compute one box of a tensor."""

    #: Memory for operands and intermediate results.
    registers: tuple[Destination, ...]
    #: Reads that fill registers.
    reads: tuple[Read, ...]
    #: The last step fills a destination of the plan, all others fill registers.
    steps: tuple[ComputeStep, ...]

    @property
    def nbytes(self) -> int:
        """Memory of the registers and the largest result, in bytes."""
        largest = max(step.box.numel * step.source.dtype.itemsize for step in self.steps)
        return largest + sum(register.nbytes for register in self.registers)


@dataclass(frozen=True, slots=True)
class SharedReads:
    """Reads that ``ranks`` divide among themselves."""

    ranks: tuple[int, ...]
    reads: tuple[Read, ...]


@dataclass(frozen=True)
class Plan:
    """All reads of one rank, and their destinations."""

    storage: Storage
    destinations: tuple[Destination, ...]
    reads: Sequence[Read]
    chunk_size: int
    computations: Sequence[Computation] = ()
    shared: Sequence[SharedReads] = ()

    @property
    def read_bytes(self) -> int:
        """Bytes that the rank needs, merged gaps included."""
        return sum(read.nbytes for read in self.all_reads())

    def all_reads(self) -> Iterator[Read]:
        """Yield every read in order of execution, shared ones last."""
        yield from self.reads
        for computation in self.computations:
            yield from computation.reads
        for shared in self.shared:
            yield from shared.reads


Numbers = npt.NDArray[np.int64]

MiB = 1 << 20
#: Maximum number of buffers of one preadv call (Linux: UIO_MAXIOV).
MAX_BUFFERS = 1024


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Limits for cutting and merging reads.

    Separate runs at equal distances become one read of several rows.
    """

    #: Maximum size of a read and of a staging buffer, in bytes.
    chunk_size: int = 8 * MiB
    #: Largest gap that is read too, as a fraction of the run before it.
    gap_share: float = 0.04
    #: A gap is also read if it and the run before it have at most this many bytes.
    gap_floor: int = 512

    def reads_through(self, gap: int, run: int) -> bool:
        """Return True to read the gap after a run too; both in bytes."""
        return gap <= self.gap_share * run or gap + run <= self.gap_floor


#: ``file, offset, nbytes, part, rows, stride`` of a ``Read`` with one part.
Segment = tuple[int, int, int, Part, int, int]


def cut_segments(
    tensors: Mapping[str, TensorEntry],
    copy: Copy,
    target: int,
    destination: Destination,
    options: PlanOptions,
) -> Iterator[Segment]:
    """Yield the segments of a copy.

    A segment is a span of the source without large gaps, of at most a chunk.
    """
    entry = tensors[str(copy.source)]
    dtype = torch_dtype(entry.dtype, entry.name)
    width = dtype.itemsize
    # Inner loops with gaps that are read too form one span. Each step of the outer loops starts a new span.
    outer, inner = _split_dense(copy.loops, width, options)
    span = _span(inner)
    # The innermost outer loop becomes rows of one read, if a row fits a chunk.
    rows = outer.pop() if outer and span * width <= options.chunk_size else None
    for indices in product(*(range(size) for size, _, _ in outer)):
        start = copy.start + sum(i * loop[1] for i, loop in zip(indices, outer, strict=True))
        to = copy.to + sum(i * loop[2] for i, loop in zip(indices, outer, strict=True))
        for first, place, loops, count in _cut_rows(
            start, to, inner, span, rows, options.chunk_size // width
        ):
            row = loops[1:] if count > 1 else loops
            direct = destination.direct and dtype == destination.dtype and is_one_run(row)
            # A single row has stride 0, so it can merge with its neighbours.
            stride = rows[1] * width if rows is not None and count > 1 else 0
            part = Part(0, dtype, target, place, loops, direct)
            yield entry.file, entry.offset + first * width, _span(loops) * width, part, count, stride


def _span(loops: Sequence[Loop]) -> int:
    """Return the number of elements from the first to the last source element."""
    return 1 + sum((size - 1) * stride for size, stride, _ in loops)


def _cut_rows(
    start: int, to: int, inner: tuple[Loop, ...], span: int, rows: Loop | None, limit: int
) -> Iterator[tuple[int, int, tuple[Loop, ...], int]]:
    if rows is None:
        for first, place, loops in _split_bounded(start, to, inner, limit):
            yield first, place, loops, 1
        return
    size, source, destination = rows
    max_rows = max(1, limit // span)
    for begin in range(0, size, max_rows):
        count = min(max_rows, size - begin)
        # Rows are ``span`` elements apart in the staging buffer, and ``source`` in the file.
        loops = ((count, span, destination), *inner) if count > 1 else inner
        yield start + begin * source, to + begin * destination, loops, count


def _split_dense(
    loops: Sequence[Loop], width: int, options: PlanOptions
) -> tuple[list[Loop], tuple[Loop, ...]]:
    span = 1
    inner: list[Loop] = []
    outer = list(loops)
    while outer:
        size, stride, _ = outer[-1]
        # Gap between two steps; none if a copy repeats or interleaves elements.
        if not options.reads_through(max(0, stride - span) * width, span * width):
            break
        span += (size - 1) * stride
        inner.insert(0, outer.pop())
    return outer, tuple(inner)


def _split_bounded(
    start: int, to: int, loops: tuple[Loop, ...], limit: int
) -> Iterator[tuple[int, int, tuple[Loop, ...]]]:
    span = _span(loops)
    if span <= limit or not loops:
        yield start, to, loops
        return
    (size, source, destination), rest = loops[0], loops[1:]
    # Cut the outermost loop into parts of as many steps as fit. If not even one fits, cut inner loops.
    below = _span(rest)
    steps = max(1, (limit - below) // source + 1) if source and below <= limit else 1
    for first in range(0, size, steps):
        count = min(steps, size - first)
        part = ((count, source, destination), *rest) if count > 1 else rest
        yield from _split_bounded(start + first * source, to + first * destination, part, limit)


def merge_reads(found_segments: Iterable[Segment], options: PlanOptions) -> Iterator[Read]:
    """Merge segments that are close in a file into reads."""
    ordered = sorted(found_segments, key=_sort_key)
    columns = ((file, at, size, part.direct, rows) for file, at, size, part, rows, _ in ordered)
    starts = [*find_starts(columns, options), len(ordered)]
    return (_make_read(ordered[first:stop]) for first, stop in pairwise(starts))


def _sort_key(segment: Segment) -> tuple[int, int, int, bool]:
    # A total order, so that reads do not depend on the order of tensors.
    return (*segment[:3], segment[3].direct)


def find_starts(columns: Iterable[tuple[int, int, int, bool, int]], options: PlanOptions) -> Iterator[int]:
    """Yield the index of the first segment of each read.

    Segments are sorted tuples ``(file, offset, bytes, direct, rows)``. Direct segments merge if there is no
    gap between them, staged ones if the gap is small. A segment of several rows never merges.
    """
    begin = end = members = 0
    group: tuple[int, bool] | None = None
    for number, (file, offset, nbytes, direct, rows) in enumerate(columns):
        # Segments of several parameters may overlap, so the last one need not have the largest end.
        until = max(end, offset + nbytes)
        if (
            group == (file, direct)
            and rows == 1
            and members < MAX_BUFFERS
            and until - begin <= options.chunk_size
            and (offset == end if direct else options.reads_through(max(0, offset - end), end - begin))
        ):
            end = until
            members += 1
        else:
            yield number
            # None equals no group, so nothing merges with a read of several rows.
            group = (file, direct) if rows == 1 else None
            begin, end, members = offset, offset + nbytes, 1


def _make_read(group: Sequence[Segment]) -> Read:
    file, begin, _, first, rows, stride = group[0]
    end = max(offset + nbytes for _, offset, nbytes, _, _, _ in group)
    parts = tuple(part._replace(at=offset - begin) for _, offset, _, part, _, _ in group)
    return Read(file, begin, end - begin, parts, first.direct, rows, stride)
