"""A plan as plain data: it can be printed, summed, compared and run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt
import torch

from zerostart.checkpoint.catalog import TensorEntry
from zerostart.checkpoint.storage import Storage
from zerostart.geometry import Box, Copy, Loop
from zerostart.recipe import Computed, torch_dtype

#: Register of an operand, its shape, and its strides there in elements (None for row-major).
OperandView = tuple[int, tuple[int, ...], tuple[int, ...] | None]


@dataclass(frozen=True, slots=True)
class Destination:
    """Local storage that the plan fills."""

    name: str
    #: Its elements, padding included.
    numel: int
    #: How many of them, from the first on, are real.
    owned: int
    dtype: torch.dtype
    #: Whether a read may land in it: host memory, and not memory behind a staging buffer.
    direct: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the storage, padding included."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Part:
    """What becomes of some of the bytes of a read."""

    #: Bytes from the start of the read to the first element.
    at: int
    #: Of the elements as they are stored.
    dtype: torch.dtype
    #: Number of the destination.
    target: int
    #: Its element that the first one goes to.
    to: int
    #: (size, source stride, destination stride), in elements.
    loops: tuple[tuple[int, int, int], ...]
    #: Whether it is one unbroken run on both sides with no cast, and can be read into place.
    direct: bool

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the last source element of the part, both included."""
        return (1 + sum((size - 1) * stride for size, stride, _ in self.loops)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Read:
    """One positioned read."""

    #: Number of the file.
    file: int
    #: Of its first byte in the file.
    offset: int
    #: Bytes that are taken: with rows those of the runs alone, one after the other.
    nbytes: int
    #: Where they go; with rows there is one part.
    parts: tuple[Part, ...]
    #: Scatters into the final places of its parts, which then tile the read without gaps; else it goes
    #: through a staging buffer.
    direct: bool
    #: Runs of equal length; what lies between them is left out.
    rows: int = 1
    #: Bytes from the start of one row to that of the next; 0 for one row.
    stride: int = 0

    @property
    def end(self) -> int:
        """One past the last byte that is read, in bytes from the begin of the file."""
        return self.offset + (self.rows - 1) * self.stride + self.nbytes // self.rows


@dataclass(frozen=True, slots=True)
class Step:
    """Evaluate a box of a computed tensor, and deliver parts of the result, which is row-major."""

    source: Computed
    #: By which the shape of ``source`` is split.
    factors: tuple[tuple[int, ...], ...]
    #: Of the split shape.
    box: Box
    #: (register, shape, strides) of the regions that they hold.
    operands: tuple[OperandView, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Computation:
    """What one box of a computed tensor is made from, step by step."""

    #: Rows of elements in memory of its own.
    registers: tuple[Destination, ...]
    #: They fill registers.
    reads: tuple[Read, ...]
    #: All but the last fill registers, too; that one delivers to a destination of the plan.
    steps: tuple[Step, ...]

    @property
    def nbytes(self) -> int:
        """Memory that it takes while it runs: the registers, and the largest result of a step."""
        largest = max(step.box.numel * step.source.dtype.itemsize for step in self.steps)
        return largest + sum(register.nbytes for register in self.registers)


@dataclass(frozen=True, slots=True)
class SharedReads:
    """Reads that all ``ranks`` want, each of which makes a share of them for the others."""

    ranks: tuple[int, ...]
    reads: tuple[Read, ...]


@dataclass(frozen=True)
class Plan:
    """Everything that one rank wants, from which files of which storage, into which destinations."""

    storage: Storage
    destinations: tuple[Destination, ...]
    reads: Sequence[Read]
    chunk_size: int
    computations: Sequence[Computation] = ()
    shared: Sequence[SharedReads] = ()

    @property
    def read_bytes(self) -> int:
        """Bytes that the rank wants, merged gaps included."""
        return sum(read.nbytes for read in self.all_reads())

    def all_reads(self) -> Iterator[Read]:
        """Every read: the rank's own in the order in which one thread makes them, then shared ones."""
        yield from self.reads
        for computation in self.computations:
            yield from computation.reads
        for shared in self.shared:
            yield from shared.reads


Numbers = npt.NDArray[np.int64]

MiB = 1 << 20
#: One preadv call takes at most this many buffers (Linux: UIO_MAXIOV).
MAX_BUFFERS = 1024


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """How reads are cut and merged.

    Runs that are left alone and follow each other at equal distances are one read of several rows.
    """

    #: Most bytes of one read, and the size of a staging buffer.
    chunk_size: int = 8 * MiB
    #: A gap between two wanted runs is read through when it is at most this share of the run before it,
    gap_share: float = 0.04
    #: or when run and gap together are at most so many bytes, where taking the run alone costs more than the
    #: bytes.
    gap_floor: int = 512

    def reads_through(self, gap: int, run: int) -> bool:
        """Whether a gap of ``gap`` bytes after a run of ``run`` bytes is read along with it."""
        return gap <= self.gap_share * run or gap + run <= self.gap_floor


#: (file, offset, bytes, part relative to offset, rows, bytes from row to row)
Segment = tuple[int, int, int, Part, int, int]


def segments(
    tensors: Mapping[str, TensorEntry],
    copy: Copy,
    target: int,
    destination: Destination,
    options: PlanOptions,
) -> Iterator[Segment]:
    """A copy as dense spans of its source tensor, none longer than a chunk."""
    entry = tensors[str(copy.source)]
    dtype = torch_dtype(entry.dtype, entry.name)
    width = dtype.itemsize
    # Innermost loops whose gaps are read through make one span; each step of the outer ones is a span of its
    # own.
    outer, inner = _dense(copy.loops, width, options)
    span = 1 + sum((size - 1) * stride for size, stride, _ in inner)
    # The innermost of the outer loops steps from row to row of one read, if a row fits into a chunk at all.
    rows = outer.pop() if outer and span * width <= options.chunk_size else None
    for indices in product(*(range(size) for size, _, _ in outer)):
        start = copy.start + sum(i * loop[1] for i, loop in zip(indices, outer, strict=True))
        to = copy.to + sum(i * loop[2] for i, loop in zip(indices, outer, strict=True))
        for first, place, loops, count in _cut(start, to, inner, span, rows, options.chunk_size // width):
            row = loops[1:] if count > 1 else loops
            direct = destination.direct and dtype == destination.dtype and is_one_run(row)
            part = Part(0, dtype, target, place, loops, direct)
            # A single row needs no distance, and merges with its neighbours as a plain span does.
            stride = rows[1] * width if rows is not None and count > 1 else 0
            yield entry.file, entry.offset + first * width, part.nbytes, part, count, stride


def _cut(
    start: int, to: int, inner: tuple[Loop, ...], span: int, rows: Loop | None, limit: int
) -> Iterator[tuple[int, int, tuple[Loop, ...], int]]:
    if rows is None:
        for first, place, loops in _bounded(start, to, inner, limit):
            yield first, place, loops, 1
        return
    size, source, destination = rows
    most = max(1, limit // span)
    for begin in range(0, size, most):
        count = min(most, size - begin)
        # In the staging buffer rows lie one after the other, ``span`` elements apart; in the file,
        # ``source``.
        loops = ((count, span, destination), *inner) if count > 1 else inner
        yield start + begin * source, to + begin * destination, loops, count


def is_one_run(loops: Sequence[Loop]) -> bool:
    """Return True if the elements follow each other without gaps in the source and in the destination."""
    return not loops or (len(loops) == 1 and loops[0][1:] == (1, 1))


def _dense(loops: Sequence[Loop], width: int, options: PlanOptions) -> tuple[list[Loop], tuple[Loop, ...]]:
    span = 1
    inner: list[Loop] = []
    outer = list(loops)
    while outer:
        size, stride, _ = outer[-1]
        # The gap between two steps, after what one step spans. Strides may be smaller than the span, where a
        # copy repeats or interleaves elements: then there is no gap.
        if not options.reads_through(max(0, stride - span) * width, span * width):
            break
        span += (size - 1) * stride
        inner.insert(0, outer.pop())
    return outer, tuple(inner)


def _bounded(
    start: int, to: int, loops: tuple[Loop, ...], limit: int
) -> Iterator[tuple[int, int, tuple[Loop, ...]]]:
    span = 1 + sum((size - 1) * stride for size, stride, _ in loops)
    if span <= limit or not loops:
        yield start, to, loops
        return
    (size, source, destination), rest = loops[0], loops[1:]
    # So many steps of the largest loop fit into the limit; where not even one does, its steps are cut one by
    # one, and the loops below it in turn.
    below = 1 + sum((n - 1) * stride for n, stride, _ in rest)
    steps = max(1, (limit - below) // source + 1) if source and below <= limit else 1
    for first in range(0, size, steps):
        count = min(steps, size - first)
        part = ((count, source, destination), *rest) if count > 1 else rest
        yield from _bounded(start + first * source, to + first * destination, part, limit)


def merged_reads(found: Iterable[Segment], options: PlanOptions) -> Iterator[Read]:
    """Segments, sorted by place, as reads: those that follow each other closely in a file are one."""
    ordered = sorted(found, key=_place)
    columns = ((file, at, size, part.direct, rows) for file, at, size, part, rows, _ in ordered)
    starts = [*read_starts(columns, options), len(ordered)]
    return (_read(ordered[first:stop]) for first, stop in pairwise(starts))


def _place(segment: Segment) -> tuple[int, int, int, bool]:
    # To the last digit, so that what is read does not depend on the order in which tensors were planned.
    return (*segment[:3], segment[3].direct)


def read_starts(found: Iterable[tuple[int, int, int, bool, int]], options: PlanOptions) -> Iterator[int]:
    """Return the numbers of the segments, sorted by place, with which a read begins.

    A segment is ``(file, offset, bytes, direct, rows)``. Direct ones are merged without a gap, staged ones
    with small gaps, rows never.
    """
    begin = end = members = 0
    group: tuple[int, bool] | None = None
    for number, (file, offset, nbytes, direct, rows) in enumerate(found):
        # Segments may overlap (several parameters of one tensor): a read ends with the furthest.
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
            # None: nothing may join a read of several rows, whatever follows.
            group = (file, direct) if rows == 1 else None
            begin, end, members = offset, offset + nbytes, 1


def _read(group: Sequence[Segment]) -> Read:
    file, begin, _, first, rows, stride = group[0]
    end = max(offset + nbytes for _, offset, nbytes, _, _, _ in group)
    parts = tuple(
        Part(offset - begin, part.dtype, part.target, part.to, part.loops, part.direct)
        for _, offset, _, part, _, _ in group
    )
    return Read(file, begin, end - begin, parts, first.direct, rows, stride)
