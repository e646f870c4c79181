"""Counting the reads of every rank at once, for worlds too large to plan rank by rank.

Holds where each rank owns one run of a parameter's row-major order (a flat partition, ``Shard(0)``) and each
recipe is made of unbroken runs. Then the reads of all ranks are the recipes' runs cut at the ranks'
boundaries, which is arithmetic on arrays. ``join`` makes the same reads; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from zerostart.checkpoint.catalog import Catalog
from zerostart.geometry import Box, copies_between, merge_runs, row_major_strides
from zerostart.planning.reads import MAX_BUFFERS, PlanOptions
from zerostart.recipe import Computed, Recipe, torch_dtype

__all__ = ["Count", "Share", "count_reads"]

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Share:
    """A recipe whose row-major order is cut into runs of ``numel`` elements, one a rank; 0: all have it."""

    recipe: Recipe
    numel: int


@dataclass(frozen=True, slots=True)
class Count:
    """One rank's reads: their bytes and number, and whether any goes through a staging buffer."""

    nbytes: int
    reads: int
    staged: bool


def count_reads(
    catalog: Catalog, shares: Iterable[Share], world_size: int, direct: bool, options: PlanOptions
) -> list[Count] | None:
    """The reads of each rank; None where a recipe is not made of unbroken runs.

    ``direct`` tells host memory, where reads of the stored dtype land in place.
    """
    columns: list[Numbers] = []
    for share in shares:
        found = _segments(catalog, share, direct, options.chunk_size)
        if found is None:
            return None
        columns += [found] if share.numel else [_of_rank(found, rank) for rank in range(world_size)]
    if not columns:
        return [Count(0, 0, False)] * world_size
    table = np.concatenate(columns, axis=1)
    order = np.lexsort((table[2], table[1], table[0]))
    return _merged(table[:, order], world_size, options)


def _segments(catalog: Catalog, share: Share, direct: bool, chunk: int) -> Numbers | None:
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
        placed.append(direct and dtype == share.recipe.target.dtype)
    begin, size = np.array(starts, np.int64), np.array(sizes, np.int64)
    every = share.numel or max(1, prod(shape))
    cuts, parent = _cut(begin, size, every, prod(shape))
    width = np.array(widths, np.int64)[parent]
    first = np.array(offsets, np.int64)[parent] + (cuts[0] - begin[parent]) * width
    rows = np.stack(
        [
            cuts[0] // every,
            np.array(files, np.int64)[parent],
            first,
            cuts[1] * width,
            np.array(placed, np.int64)[parent],
        ]
    )
    return _bounded(rows, width, chunk)


def _of_rank(rows: Numbers, rank: int) -> Numbers:
    copy = rows.copy()
    copy[0] = rank
    return copy


def _cut(begin: Numbers, size: Numbers, every: int, total: int) -> tuple[Numbers, Numbers]:
    """Cut runs at the multiples of ``every``: rows ``start, size`` of the parts, and each part's run."""
    inner = np.arange(every, total, every, dtype=np.int64)
    by_place = np.argsort(begin)
    owner = by_place[np.searchsorted(begin[by_place], inner, side="right") - 1]
    inside = inner > begin[owner]
    starts = np.concatenate([begin, inner[inside]])
    parents = np.concatenate([np.arange(len(begin)), owner[inside]])
    order = np.argsort(starts, kind="stable")
    starts, parents = starts[order], parents[order]
    ends = begin[parents] + size[parents]
    following = np.append(starts[1:], total)
    return np.stack([starts, np.minimum(ends, following) - starts]), parents


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


def _merged(table: Numbers, world_size: int, options: PlanOptions) -> list[Count]:
    """Merge segments, sorted by rank and place, by the join's rule; sum up by rank."""
    nbytes, reads, staged = [0] * world_size, [0] * world_size, [False] * world_size
    group: tuple[int, int, int] | None = None  # rank, file, lands in place
    begin = end = members = 0
    for rank, file, offset, size, placed in table.T.tolist():
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
