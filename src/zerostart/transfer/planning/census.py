"""Count the reads of every rank at once, for large worlds.

Layers repeat. ``join`` cuts every parameter into segments; here only the first parameter of each kind is cut,
on every rank. The others of that kind have the same segments at other offsets, and are counted with NumPy.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from zerostart.checkpoint.catalog import Catalog
from zerostart.geometry import Copy
from zerostart.geometry.layout import Layout
from zerostart.recipe import Computed, Recipe
from zerostart.transfer.planning.join import plan_computations, pull_back
from zerostart.transfer.planning.plan import (
    Destination,
    Numbers,
    PlanOptions,
    cut_segments,
    find_starts,
)

#: Number of ranks in one table.
RANKS = 64


@dataclass(frozen=True, slots=True)
class Share:
    """A recipe, and the layouts of its parameter by rank.

    Pass equal layouts as one object: only parameters with the identical ``layouts`` can be of one kind.
    ``direct`` is as in ``Destination``.
    """

    recipe: Recipe
    layouts: Sequence[tuple[int, Layout]]
    direct: bool


@dataclass(frozen=True, slots=True)
class Count:
    """One rank's reads: their bytes, their number, and True if any is staged.

    ``scratch`` is the maximum memory of simultaneous computations, in bytes.
    """

    nbytes: int
    reads: int
    staged: bool
    scratch: int = 0


def count_reads(
    catalog: Catalog, shares: Iterable[Share], ranks: Sequence[int], options: PlanOptions, threads: int
) -> list[Count]:
    """Count the reads in each rank's plan, with ``threads`` for computations."""
    census = _Census(catalog, ranks, options)
    for share in shares:
        census.add(share)
    return census.counts(threads)


@dataclass(frozen=True)
class _Kind:
    """Segments that all parameters of one kind have, and where their source tensors start.

    Positions are byte offsets in the concatenation of all files, with gaps between them.
    """

    #: Columns: index of the rank, index of the source, offset in the source, bytes, direct and rows.
    table: Numbers
    #: For each parameter: position of each of its sources.
    sources: list[list[int]] = field(default_factory=list)

    def place_rows(self, length: int, ranks: range) -> Numbers:
        """Return ``position, bytes, direct, rows`` of each segment on ``ranks``.

        The segments are those of all parameters of this kind. Positions of a rank start at a multiple of
        ``length``, which is the length of the concatenation.
        """
        begin, end = np.searchsorted(self.table[0], (ranks.start, ranks.stop))
        rank, source, offset, *rest = self.table[:, begin:end]
        place = np.array(self.sources, np.int64)[:, source] + ((rank - ranks.start) * length + offset)
        return np.stack([place.ravel(), *(np.tile(column, len(self.sources)) for column in rest)])


class _Census:
    def __init__(self, catalog: Catalog, ranks: Sequence[int], options: PlanOptions) -> None:
        self._tensors = catalog.tensors
        self._options = options
        self._number = {rank: number for number, rank in enumerate(ranks)}
        self._kinds: dict[Hashable, _Kind] = {}
        #: For each rank, the reads and memory of its computations.
        self._computed: list[list[Count]] = [[] for _ in ranks]
        # Put more than a chunk between two files, so that no read crosses the end of one.
        ends = np.cumsum(np.array([0, *catalog.sizes], np.int64) + options.chunk_size + 1).tolist()
        self._files, self._length = ends[:-1], ends[-1]

    def add(self, share: Share) -> None:
        """Count the reads of ``share`` on every rank."""
        names = [str(s) for p in share.recipe.pieces for s in p.source if not isinstance(s, Computed)]
        number = {name: n for n, name in enumerate(dict.fromkeys(names))}
        entries = [self._tensors[name] for name in number]
        # Parameters are of one kind if their pieces are equal except for the names of their sources. Each
        # computed parameter is a separate kind, since its steps are not compared.
        key: Hashable = share.recipe
        if not share.recipe.computed:
            key = (
                tuple((p.origin, p.axes, p.unit, p.offset, len(p.source)) for p in share.recipe.pieces),
                tuple(number[name] for name in names),
                tuple(entry.dtype for entry in entries),
                share.recipe.target.dtype,
            )
        # Use the id of the layouts: comparing those of thousands of ranks would take longer than counting.
        # The caller keeps the object alive.
        key = (key, id(share.layouts), share.direct)
        if key not in self._kinds:
            self._kinds[key] = _Kind(self._make_table(share, number))
        self._kinds[key].sources.append([self._files[entry.file] + entry.offset for entry in entries])

    def _make_table(self, share: Share, number: dict[str, int]) -> Numbers:
        target = share.recipe.target
        rows: list[tuple[int, ...]] = []
        for rank, layout in share.layouts:
            # Segments depend only on the dtype and ``direct`` of the destination.
            to = Destination(target.name, layout.numel, layout.owned, target.dtype, share.direct)
            to_compute: list[Copy] = []
            for copy in pull_back(share.recipe, layout):
                if isinstance(copy.source, Computed):
                    to_compute.append(copy)
                    continue
                source = str(copy.source)
                base = self._tensors[source].offset
                spans = cut_segments(self._tensors, copy, 0, to, self._options)
                for _, offset, nbytes, part, count, _ in spans:
                    place = (self._number[rank], number[source], offset - base)
                    rows.append((*place, nbytes, part.direct, count))
            for computation in plan_computations(self._tensors, to_compute, 0, self._options):
                reads = computation.reads
                staged = any(not read.direct for read in reads)
                counted = Count(sum(read.nbytes for read in reads), len(reads), staged, computation.nbytes)
                self._computed[self._number[rank]].append(counted)
        return np.array(rows, np.int64).reshape(-1, 6).T

    def counts(self, threads: int) -> list[Count]:
        return [
            Count(
                of_rank + sum(one.nbytes for one in computed),
                number + sum(one.reads for one in computed),
                through_buffer or any(one.staged for one in computed),
                # In the worst case the largest computations run at the same time, one in each thread.
                sum(sorted((one.scratch for one in computed), reverse=True)[:threads]),
            )
            for (of_rank, number, through_buffer), computed in zip(
                self._iter_counts(), self._computed, strict=True
            )
        ]

    def _iter_counts(self) -> Iterator[tuple[int, int, bool]]:
        """Yield bytes, reads and use of staging buffers of each rank, without computations."""
        world = len(self._number)
        # A few ranks at a time, since a table of all ranks would take too much memory.
        for ranks in (range(at, min(at + RANKS, world)) for at in range(0, world, RANKS)):
            kinds = (kind.place_rows(self._length, ranks) for kind in self._kinds.values())
            table = np.concatenate([np.empty((4, 0), np.int64), *kinds], axis=1)
            # Positions of two ranks are further apart than any read, so no read crosses ranks. Sort as
            # ``merge_reads`` does.
            place, nbytes, direct, _ = table = table[:, np.lexsort((table[2], table[1], table[0]))]
            starts = _find_starts(table, self._options)
            sizes = np.maximum.reduceat(place + nbytes, starts) - place[starts] if len(starts) else starts
            # The reads of one rank are adjacent, so its sums are differences of running totals.
            bounds = np.searchsorted(place[starts], np.arange(len(ranks) + 1) * self._length)
            total = np.concatenate([[0], np.cumsum(sizes)])[bounds]
            staged = np.bincount(place[direct == 0] // self._length, minlength=len(ranks)) > 0
            yield from zip(np.diff(total).tolist(), np.diff(bounds).tolist(), staged.tolist(), strict=True)


def _find_starts(table: Numbers, options: PlanOptions) -> Numbers:
    """Return the index of the first segment of each read, as ``find_starts`` does."""
    place, nbytes, direct, rows = table
    gap = place[1:] - np.maximum.accumulate(place + nbytes)[:-1]
    # Most segments certainly start a read: they are too far from the previous one, or too long to merge.
    widest = np.where(direct[1:] != 0, 0, max(options.gap_floor, int(options.gap_share * options.chunk_size)))
    sure = (gap > widest) | (place[1:] + nbytes[1:] - place[:-1] > options.chunk_size)
    sure |= (direct[1:] != direct[:-1]) | (rows[1:] != 1) | (rows[:-1] != 1)
    group = np.cumsum(np.concatenate([np.zeros(min(1, len(place)), np.int64), sure]))
    # For the other segments, all earlier ones decide: run ``find_starts`` on these groups only.
    open_rows = np.flatnonzero(np.bincount(group)[group] > 1) if len(group) else group
    columns = (column[open_rows].tolist() for column in (group, place, nbytes, direct, rows))
    starts = np.fromiter(find_starts(zip(*columns, strict=True), options), np.int64)
    return np.union1d(np.flatnonzero(np.diff(group, prepend=-1)), open_rows[starts])
