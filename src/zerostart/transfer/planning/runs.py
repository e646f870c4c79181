"""Sets of bytes as rows of equal runs: who sends what to whom is an intersection of two of them.

A rank's part of a matrix that is cut by columns is as many runs as the matrix has rows, at equal distances:
one row here. Rows stay rows wherever they can, so that the messages of a large model are worked out on
thousands of numbers and not on hundreds of millions; everything is done on whole arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from zerostart.checkpoint.write.shards import SaveLayout
from zerostart.errors import CheckpointError
from zerostart.transfer.planning.plan import Plan
from zerostart.transfer.planning.writes import WritePlan

Numbers = npt.NDArray[np.int64]

#: Candidates of rows that may meet, for each row, from which on rows are taken apart into single runs.
MOST_MEETINGS = 16


@dataclass(frozen=True, eq=False)
class Runs:
    """A set of bytes: disjoint rows ``start, width, stride, count``, by ascending start.

    A row is ``count`` runs of ``width`` bytes, ``stride`` bytes from start to start; a single run has
    ``stride`` 0. Made by the class methods, which see to that.
    """

    rows: Numbers

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int, int, int]] | Numbers) -> Runs:
        """The bytes of any ``rows``, which may overlap and come in any order."""
        if not isinstance(rows, np.ndarray):
            rows = np.array(list(rows), np.int64)
        return cls(_tidied(_disjoint(_plain(rows.reshape(-1, 4).astype(np.int64, copy=False)))))

    @classmethod
    def of_reads(cls, plan: Plan) -> Runs:
        """The bytes that ``plan`` reads of its one file, also for computations and in merged gaps."""
        rows = [(r.offset, r.nbytes // r.rows, r.stride, r.rows) for r in plan.all_reads()]
        return cls.of(rows)

    @classmethod
    def of_writes(cls, plan: WritePlan, layout: SaveLayout) -> Runs:
        """The bytes that ``plan`` writes of the one file of ``layout``."""
        found = []
        for write in plan.writes:
            width = write.dtype.itemsize
            begin = layout.tensors[write.name].offset + write.first * width
            starts, lengths = write.runs()
            rows = np.zeros((len(starts), 4), np.int64)
            rows[:, 0], rows[:, 1], rows[:, 3] = begin + starts * width, lengths * width, 1
            # At once: a column of a matrix has as many runs as the matrix has rows, and then is one row.
            found.append(_packed(rows))
        return cls.of(np.concatenate(found) if found else _NONE)

    @classmethod
    def from_bytes(cls, data: bytes) -> Runs:
        """What ``to_bytes`` gave. Raises CheckpointError for anything else."""
        if len(data) % 32:
            raise CheckpointError(f"{len(data)} bytes are no rows of four numbers of 8 bytes")
        rows = np.frombuffer(data, "<i8").astype(np.int64).reshape(-1, 4)
        start, width, stride, count = rows.T
        # Bounded, so that no sum of them leaves 64 bits.
        limit = 1 << 53
        if (rows < 0).any() or (rows > limit).any() or (width == 0).any() or (count == 0).any():
            raise CheckpointError("rows of bytes with numbers that no file has")
        last = (start + width).astype(float) + stride.astype(float) * (count - 1)
        if (last > limit).any() or (np.diff(start) < 0).any() or ((count > 1) & (stride < width)).any():
            raise CheckpointError("rows of bytes that overlap, are out of order, or reach beyond any file")
        return cls(rows)

    def to_bytes(self) -> bytes:
        """32 bytes a row: four numbers of 8 bytes, little-endian."""
        return self.rows.astype("<i8").tobytes()

    @cached_property
    def nbytes(self) -> int:
        """How many bytes there are."""
        return int((self.rows[:, 1] * self.rows[:, 3]).sum())

    @cached_property
    def spans(self) -> Numbers:
        """Rows ``first byte, one past the last`` of the single runs, ascending; those that touch are one."""
        return _joined(_expanded(self.rows))

    @property
    def end(self) -> int:
        """One past the last byte of all; 0 where there is none."""
        return int(_ends(self.rows).max(initial=0))

    def union(self, *others: Runs) -> Runs:
        """The bytes of any of them."""
        return Runs.of(np.concatenate([self.rows, *(other.rows for other in others)]))

    def intersect(self, other: Runs) -> Runs:
        """The bytes of both."""
        return Runs(_tidied(_met(self.rows, other.rows)))

    def within(self, low: int, high: int) -> Runs:
        """Those from ``low`` up to ``high``, this one not included."""
        if low >= high:
            return Runs(_NONE)
        return self.intersect(Runs(np.array([[low, high - low, 0, 1]], np.int64)))

    def without(self, other: Runs) -> Runs:
        """Those that ``other`` has not."""
        if not len(self.rows) or not len(other.rows):
            return self
        # What lies between the runs of the other one, from far below to far above.
        spans = other.spans
        edges = np.concatenate([[0], spans.ravel(), [max(int(self.spans[-1, 1]), int(spans[-1, 1])) + 1]])
        gaps = edges.reshape(-1, 2)
        gaps = gaps[gaps[:, 1] > gaps[:, 0]]
        return self.intersect(Runs(_singles(gaps)))

    def batches(self, limit: int) -> Iterator[Runs]:
        """The same bytes in parts of at most ``limit`` bytes: the messages of a transfer.

        Both sides make the same parts of the same bytes, so that none has to be announced.
        """
        rows = _cut(self.rows, limit)
        ends = np.cumsum(rows[:, 1] * rows[:, 3])
        first, done = 0, 0
        while first < len(rows):
            stop = int(np.searchsorted(ends, done + limit, "right"))
            yield Runs(rows[first:stop][np.argsort(rows[first:stop, 0])])
            first, done = stop, int(ends[stop - 1])


_NONE: Numbers = np.empty((0, 4), np.int64)


def _singles(spans: Numbers) -> Numbers:
    rows = np.zeros((len(spans), 4), np.int64)
    rows[:, 0], rows[:, 1], rows[:, 3] = spans[:, 0], spans[:, 1] - spans[:, 0], 1
    return rows


def _plain(rows: Numbers) -> Numbers:
    """Nothing empty; rows without gaps, or of one run, as a single run."""
    rows = rows[(rows[:, 1] > 0) & (rows[:, 3] > 0)].copy()
    _, width, stride, count = rows.T
    dense = (count > 1) & (stride <= width)
    width[dense] += (count[dense] - 1) * stride[dense]
    count[dense] = 1
    stride[count == 1] = 0
    return rows


def _ends(rows: Numbers) -> Numbers:
    """One past the last byte of each row."""
    ends: Numbers = rows[:, 0] + (rows[:, 3] - 1) * rows[:, 2] + rows[:, 1]
    return ends


def _expanded(rows: Numbers) -> Numbers:
    """Every run by itself, as (first byte, one past the last), in the order of rows."""
    start, width, stride, count = rows.T
    row = np.repeat(np.arange(len(rows)), count)
    number = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    begin = start[row] + number * stride[row]
    return np.stack([begin, begin + width[row]], axis=1)


def _joined(spans: Numbers, touching: bool = True) -> Numbers:
    """The same bytes as spans that do not overlap, nor touch if ``touching`` ones are joined; ascending."""
    if len(spans) < 2:
        return spans
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reach = np.maximum.accumulate(spans[:, 1])
    first = np.flatnonzero(np.concatenate([[True], spans[1:, 0] >= reach[:-1] + touching]))
    return np.stack([spans[first, 0], np.maximum.reduceat(spans[:, 1], first)], axis=1)


def _disjoint(rows: Numbers) -> Numbers:
    """Rows of the same bytes that have no byte twice; those that had none are left as they are."""
    if len(rows) < 2:
        return rows
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    # Islands of rows whose extents overlap: only within these can a byte be in two rows.
    reach = np.maximum.accumulate(_ends(rows))
    first = np.flatnonzero(np.concatenate([[True], rows[1:, 0] >= reach[:-1]]))
    size = np.diff(first, append=len(rows))
    island = np.repeat(np.arange(len(first)), size)
    crowded = size[island] > 1
    if not crowded.any():
        return rows
    # Columns of one matrix interleave without having a byte in common, and stay rows.
    spans = _joined(_expanded(rows[crowded]), touching=False)  # an island's own, then
    owner = np.searchsorted(rows[first, 0], spans[:, 0], "right") - 1
    found = np.bincount(owner, spans[:, 1] - spans[:, 0], len(first)).astype(np.int64)
    summed = np.bincount(island, rows[:, 1] * rows[:, 3], len(first)).astype(np.int64)
    twice = (size > 1) & (found < summed)
    rows = np.concatenate([rows[~twice[island]], _packed(_singles(spans[twice[owner]]))])
    return rows[np.argsort(rows[:, 0], kind="stable")]


def _tidied(rows: Numbers) -> Numbers:
    """Disjoint rows as fewer ones, by ascending start: what touches is one run, what is regular one row."""
    if len(rows) < 2:
        return rows
    rows = _plain(rows)
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    single = rows[:, 3] == 1
    runs = rows[single]
    spans = np.stack([runs[:, 0], runs[:, 0] + runs[:, 1]], axis=1)
    rows = np.concatenate([_packed(_singles(_joined(spans))), rows[~single]])
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    return _chained(rows)


def _packed(runs: Numbers) -> Numbers:
    """Single runs by ascending start, three or more of one width at one distance as a row."""
    if len(runs) < 3:
        return runs
    start, width = runs[:, 0], runs[:, 1]
    step = np.diff(start)
    alike = width[1:] == width[:-1]
    # Link n is between the runs n and n + 1. It joins them where the link before or behind is the same.
    same = alike[1:] & alike[:-1] & (step[1:] == step[:-1])
    joins = np.concatenate([same, [False]]) | np.concatenate([[False], same])
    # Where one distance ends and another begins at a run, the run goes with the ones before it.
    joins[1:] &= ~(joins[:-1] & ~same)
    first = np.flatnonzero(np.concatenate([[True], ~joins]))
    rows = runs[first]
    rows[:, 3] = np.diff(first, append=len(runs))
    rows[:, 2] = np.where(rows[:, 3] > 1, np.append(step, 0)[first], 0)
    return rows


def _chained(rows: Numbers) -> Numbers:
    """Rows of which one goes on where the one before ends, as one row."""
    many = rows[rows[:, 3] > 1]
    if len(many) < 2:
        return rows
    # Side by side those that may be one: of one width and stride, and a multiple of the stride apart.
    phase = many[:, 0] % many[:, 2]
    many = many[np.lexsort((many[:, 0], phase, many[:, 2], many[:, 1]))]
    start, width, stride, count = many.T
    follows = (
        (width[1:] == width[:-1])
        & (stride[1:] == stride[:-1])
        & (start[1:] == start[:-1] + stride[:-1] * count[:-1])
    )
    first = np.flatnonzero(np.concatenate([[True], ~follows]))
    longer = many[first]
    longer[:, 3] = np.add.reduceat(count, first)
    rows = np.concatenate([rows[rows[:, 3] == 1], longer])
    return rows[np.argsort(rows[:, 0], kind="stable")]


def _cut(rows: Numbers, limit: int) -> Numbers:
    """The rows, in order, those of more than ``limit`` bytes in parts."""
    large = np.flatnonzero(rows[:, 1] * rows[:, 3] > limit)
    if not len(large):
        return rows
    parts, done = [], 0
    for at in large.tolist():
        start, width, stride, count = rows[at].tolist()
        parts.append(rows[done:at])
        if width <= limit:
            each = limit // width
            first = np.arange(0, count, each)
            size = np.minimum(each, count - first)
            begin, length = start + first * stride, np.full(len(first), width)
        else:
            # A run of more than a message: each of the row's runs in pieces.
            first = np.arange(0, width, limit)
            begin = (start + np.arange(count)[:, None] * stride + first).ravel()
            length = np.tile(np.minimum(limit, width - first), count)
            size = np.ones(len(begin), np.int64)
        parts.append(np.stack([begin, length, np.where(size > 1, stride, 0), size], axis=1))
        done = at + 1
    return np.concatenate([*parts, rows[done:]])


def _met(a: Numbers, b: Numbers) -> Numbers:
    """The bytes that two tables of disjoint rows have in common, as disjoint rows in any order."""
    if not len(a) or not len(b):
        return _NONE
    # Which rows can meet: those whose extents overlap.
    ends = np.maximum.accumulate(_ends(a))
    low = np.searchsorted(ends, b[:, 0], "right")
    high = np.searchsorted(a[:, 0], _ends(b), "left")
    many = np.maximum(high - low, 0)
    if int(many.sum()) > MOST_MEETINGS * (len(a) + len(b)) and (a[:, 3].max() > 1 or b[:, 3].max() > 1):
        # Many rows between one another: as single runs they meet only where they have bytes in common.
        return _met(_singles(_joined(_expanded(a))), _singles(_joined(_expanded(b))))
    right = np.repeat(np.arange(len(b)), many)
    left = np.arange(len(right)) - np.repeat(np.cumsum(many) - many, many) + np.repeat(low, many)
    x, y = a[left], b[right]
    meet = np.maximum(x[:, 0], y[:, 0]) < np.minimum(_ends(x), _ends(y))
    x, y = x[meet], y[meet]
    one, other = x[:, 3] == 1, y[:, 3] == 1
    alike = ~one & ~other & (x[:, 2] == y[:, 2])
    rest = ~one & ~other & ~alike
    return np.concatenate(
        [
            _clipped(y[one], x[one]),
            _clipped(x[~one & other], y[~one & other]),
            *_in_step(x[alike], y[alike]),
            _out_of_step(x[rest], y[rest]),
        ]
    )


def _clipped(rows: Numbers, runs: Numbers) -> Numbers:
    """Of each row what lies in the single run beside it."""
    low, high = runs[:, 0], runs[:, 0] + runs[:, 1]
    begin, width, stride, count = _reaching(rows, low, high).T
    last = begin + (count - 1) * stride
    # Cut within the first run, or within the last one, these are runs of their own.
    torn = (count > 0) & (low > begin)
    frayed = (count > 0) & (high < last + width) & ~(torn & (count == 1))
    head = np.stack([low, np.minimum(begin + width, high) - low], axis=1)[torn]
    tail = np.stack([last, high - last], axis=1)[frayed]
    whole = count - torn - frayed
    begin = begin + torn * stride
    middle = np.stack([begin, width, np.where(whole > 1, stride, 0), whole], axis=1)[whole > 0]
    ones = np.zeros((len(head) + len(tail), 4), np.int64)
    ones[:, :2], ones[:, 3] = np.concatenate([head, tail]), 1
    return np.concatenate([middle, ones])


def _in_step(a: Numbers, b: Numbers) -> tuple[Numbers, Numbers]:
    """Of pairs of rows with one stride: what their runs have in common."""
    stride = np.maximum(a[:, 2], 1)
    ahead, phase = np.divmod(b[:, 0] - a[:, 0], stride)

    def shared(low: Numbers, high: Numbers, ahead: Numbers) -> Numbers:
        first, stop = np.maximum(ahead, 0), np.minimum(a[:, 3], b[:, 3] + ahead)
        count = stop - first
        made = np.stack([a[:, 0] + first * stride + low, high - low, stride, count], axis=1)
        made[:, 2] *= count > 1
        some: Numbers = made[(high > low) & (count > 0)]
        return some

    # A run of b may reach into the next period of a.
    over = np.minimum(a[:, 1], phase + b[:, 1] - stride)
    return (
        shared(phase, np.minimum(a[:, 1], phase + b[:, 1]), ahead),
        shared(np.zeros_like(phase), over, ahead + 1),
    )


def _out_of_step(a: Numbers, b: Numbers) -> Numbers:
    """Of pairs of rows with two strides: run by run of that with fewer runs where both are."""
    if not len(a):
        return _NONE
    low, high = np.maximum(a[:, 0], b[:, 0]), np.minimum(_ends(a), _ends(b))
    a, b = _reaching(a, low, high), _reaching(b, low, high)
    some = (a[:, 3] > 0) & (b[:, 3] > 0)
    a, b = a[some], b[some]
    swap = (b[:, 3] < a[:, 3])[:, None]
    few, many = np.where(swap, b, a), np.where(swap, a, b)
    spans = _expanded(few)
    return _clipped(np.repeat(many, few[:, 3], axis=0), _singles(spans))


def _reaching(rows: Numbers, low: Numbers, high: Numbers) -> Numbers:
    """Of each row the runs that have a byte from ``low`` up to ``high`` of the row; their count may be 0."""
    start, width, stride, count = rows.T
    step = np.maximum(stride, 1)
    first = np.clip((low - start - width) // step + 1, 0, count)
    stop = np.clip(-((start - high) // step), 0, count)
    return np.stack([start + first * stride, width, stride, np.maximum(stop - first, 0)], axis=1)
