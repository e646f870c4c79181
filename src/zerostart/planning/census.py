"""Counting the reads of every rank at once, for worlds too large to plan rank by rank.

Holds where each recipe is made of unbroken runs of the parameter's row-major order. What a rank owns is such
runs too (one in a flat partition or ``Shard(0)``, more where experts are cut as well), so the reads of all
ranks are where the two meet, which is arithmetic on arrays. ``join`` makes the same reads; a test holds the
two together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from zerostart.checkpoint.catalog import Catalog
from zerostart.geometry import Box, copies_between, merge_runs, row_major_strides
from zerostart.layout import Layout
from zerostart.planning.reads import MAX_BUFFERS, PlanOptions
from zerostart.recipe import Computed, Recipe, torch_dtype

__all__ = ["Count", "Runs", "Share", "count_reads", "runs_of"]

Numbers = npt.NDArray[np.int64]


#: Rows ``start, stop, rank, box``: runs of a parameter's row-major order, whose each is, and of which box of
#: that rank's layout. A run may have several owners.
Runs = Numbers


@dataclass(frozen=True, slots=True)
class Share:
    """A recipe, and the runs of its parameter that each rank reads.

    ``direct`` tells host memory, where reads of the stored dtype land in place.
    """

    recipe: Recipe
    runs: Runs
    direct: bool


def runs_of(layouts: Iterable[tuple[int, Layout]]) -> Runs:
    """The runs of ranks with their layouts; neighbours in the parameter and in storage are one."""
    rows: list[tuple[int, int, int, int]] = []
    for rank, layout in layouts:
        end = (-1, -1)
        for number, placed in enumerate(layout.boxes):
            for first, count, place in replace(layout, boxes=(placed,)).runs():
                if end == (first, place):
                    rows[-1] = (rows[-1][0], first + count, *rows[-1][2:])
                else:
                    rows.append((first, first + count, rank, number))
                end = (first + count, place + count)
    return np.array(rows, np.int64).reshape(-1, 4).T


@dataclass(frozen=True, slots=True)
class Count:
    """One rank's reads: their bytes and number, whether any goes through a staging buffer, and computations.

    ``scratch`` is the most memory that computations take at a time.
    """

    nbytes: int
    reads: int
    staged: bool
    scratch: int = 0


def count_reads(
    catalog: Catalog, shares: Iterable[Share], world_size: int, options: PlanOptions
) -> list[Count] | None:
    """The reads of each rank; None where a recipe is not made of unbroken runs."""
    columns: list[Numbers] = []
    for share in shares:
        found = _segments(catalog, share, options.chunk_size)
        if found is None:
            return None
        columns.append(found)
    if not columns:
        return [Count(0, 0, False)] * world_size
    table = np.concatenate(columns, axis=1)
    order = np.lexsort((table[2], table[1], table[0]))
    return _merged(table[:, order], world_size, options)


def _segments(catalog: Catalog, share: Share, chunk: int) -> Numbers | None:
    """Rows ``rank, file, offset, bytes, lands in place`` of one parameter's reads, before merging."""
    shape = share.recipe.target.shape
    box = Box((0,) * len(shape), shape)
    starts, sizes, files, offsets, widths, placed = [], [], [], [], [], []
    strides = row_major_strides(shape)
    pieces = share.recipe.pieces
    for copy in merge_runs(copy for piece in pieces for copy in copies_between(piece, box, 0, strides)):
        if not copy.contiguous or isinstance(copy.source, Computed):
            return None
        entry = catalog.tensors[str(copy.source)]
        dtype = torch_dtype(entry.dtype, entry.name)
        starts.append(copy.to)
        sizes.append(copy.numel)
        files.append(entry.file)
        offsets.append(entry.offset + copy.start * dtype.itemsize)
        widths.append(dtype.itemsize)
        placed.append(share.direct and dtype == share.recipe.target.dtype)
    if not starts or not share.runs.size:
        return np.empty((5, 0), np.int64)
    begin, size = np.array(starts, np.int64), np.array(sizes, np.int64)
    first, length, parent, rank, number = _meet(begin, size, share.runs)
    seen = (parent * (rank.max(initial=0) + 1) + rank) * (number.max(initial=0) + 1) + number
    if len(np.unique(seen)) < len(seen):
        return None  # Columns of one tensor, as one box of a rank: the join may read through what is between.
    width = np.array(widths, np.int64)[parent]
    rows = np.stack(
        [
            rank,
            np.array(files, np.int64)[parent],
            np.array(offsets, np.int64)[parent] + (first - begin[parent]) * width,
            length * width,
            np.array(placed, np.int64)[parent],
        ]
    )
    return _bounded(rows, width, chunk)


def _meet(begin: Numbers, size: Numbers, runs: Runs) -> tuple[Numbers, ...]:
    """Where runs meet the copies ``begin, size``, which tile the order: start, length, copy, rank, box."""
    order = np.argsort(begin)
    starts = begin[order]
    low = np.searchsorted(starts, runs[0], side="right") - 1
    high = np.searchsorted(starts, runs[1], side="left")
    count = high - low
    run = np.repeat(np.arange(runs.shape[1]), count)
    within = np.arange(len(run)) - np.repeat(np.cumsum(count) - count, count)
    parent = order[low[run] + within]
    first = np.maximum(runs[0][run], begin[parent])
    last = np.minimum(runs[1][run], begin[parent] + size[parent])
    return first, last - first, parent, runs[2][run], runs[3][run]


def _bounded(rows: Numbers, width: Numbers, chunk: int) -> Numbers:
    """Cut what is longer than a chunk, as the join does: whole chunks from the start, then the rest."""
    most = chunk // width * width
    count = -(-rows[3] // most)
    if int(count.max(initial=1)) == 1:
        return rows
    parent = np.repeat(np.arange(rows.shape[1]), count)
    number = np.arange(len(parent)) - np.repeat(np.cumsum(count) - count, count)
    out = rows[:, parent].copy()
    out[2] += number * most[parent]
    out[3] = np.minimum(most[parent], rows[3][parent] - number * most[parent])
    return out


def _rows(table: Numbers) -> Iterator[list[int]]:
    # As Python integers, for the speed of the loop, but not all at once: they take ten times the room.
    for start in range(0, table.shape[1], 1 << 16):
        yield from table[:, start : start + (1 << 16)].T.tolist()


def _merged(table: Numbers, world_size: int, options: PlanOptions) -> list[Count]:
    """Merge segments, sorted by rank and place, by the join's rule; sum up by rank."""
    nbytes, reads, staged = [0] * world_size, [0] * world_size, [False] * world_size
    group: tuple[int, int, int] | None = None  # rank, file, lands in place
    begin = end = members = 0
    for rank, file, offset, size, placed in _rows(table):
        staged[rank] |= not placed
        until = max(end, offset + size)
        joins = (
            group == (rank, file, placed) and members < MAX_BUFFERS and until - begin <= options.chunk_size
        )
        if joins:
            gap = max(0, offset - end)
            joins = offset == end if placed else options.reads_through(gap, end - begin)
        if joins:
            nbytes[rank] += until - end
            members += 1
            end = until
        else:
            nbytes[rank] += size
            reads[rank] += 1
            group, begin, end, members = (rank, file, placed), offset, offset + size, 1
    return [Count(*row) for row in zip(nbytes, reads, staged, strict=True)]
