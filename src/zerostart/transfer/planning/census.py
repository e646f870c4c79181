"""Count the reads of every rank at once, for large worlds.

Layers repeat: parameters of one kind are cut into segments once for each rank, as in ``join``. All others of
that kind are then arithmetic on arrays.
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

#: Number of ranks that are counted at a time.
RANKS = 64


@dataclass(frozen=True, slots=True)
class Share:
    """A recipe, and the layouts of its parameter by rank.

    Shares with one and the same ``layouts`` object are cut alike. ``direct`` means host memory, where reads
    of the stored dtype land in place.
    """

    recipe: Recipe
    layouts: Sequence[tuple[int, Layout]]
    direct: bool


@dataclass(frozen=True, slots=True)
class Count:
    """One rank's reads: bytes, number, and whether any is staged.

    ``scratch`` is the maximum memory of computations at a time, in bytes.
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
    """Segments of parameters of one kind, relative to their sources."""

    #: Columns: rank (its number among the counted ones), source, offset, bytes, direct and rows.
    table: Numbers
    #: Starts of each parameter's sources, with all files in one row.
    sources: list[list[int]] = field(default_factory=list)

    def place_rows(self, line: int, ranks: range) -> Numbers:
        """Return rows ``place, bytes, direct, rows`` of all parameters on ``ranks``."""
        begin, end = np.searchsorted(self.table[0], (ranks.start, ranks.stop))
        rank, source, offset, *rest = self.table[:, begin:end]
        place = np.array(self.sources, np.int64)[:, source] + ((rank - ranks.start) * line + offset)
        return np.stack([place.ravel(), *(np.tile(column, len(self.sources)) for column in rest)])


class _Census:
    def __init__(self, catalog: Catalog, ranks: Sequence[int], options: PlanOptions) -> None:
        self._tensors = catalog.tensors
        self._options = options
        self._number = {rank: number for number, rank in enumerate(ranks)}
        self._kinds: dict[Hashable, _Kind] = {}
        #: For each rank, the reads and memory of its computations.
        self._computed: list[list[Count]] = [[] for _ in ranks]
        # More than a chunk between files, so that no read crosses their ends.
        ends = np.cumsum(np.array([0, *catalog.sizes], np.int64) + options.chunk_size + 1).tolist()
        self._files, self._line = ends[:-1], ends[-1]

    def add(self, share: Share) -> None:
        """Count the reads of ``share`` on every rank."""
        names = [str(s) for p in share.recipe.pieces for s in p.source if not isinstance(s, Computed)]
        number = {name: n for n, name in enumerate(dict.fromkeys(names))}
        entries = [self._tensors[name] for name in number]
        # Parameters are of one kind if their pieces agree except for the names of their sources. Each
        # computed parameter is a kind, since its steps are not compared.
        key: Hashable = share.recipe
        if not share.recipe.computed:
            key = (
                tuple((p.origin, p.axes, p.unit, p.offset, len(p.source)) for p in share.recipe.pieces),
                tuple(number[name] for name in names),
                tuple(entry.dtype for entry in entries),
                share.recipe.target.dtype,
            )
        # The identity, since comparing the layouts of thousands of ranks would take longer than counting. The
        # caller keeps them alive.
        key = (key, id(share.layouts), share.direct)
        if key not in self._kinds:
            self._kinds[key] = _Kind(self._make_table(share, number))
        self._kinds[key].sources.append([self._files[entry.file] + entry.offset for entry in entries])

    def _make_table(self, share: Share, number: dict[str, int]) -> Numbers:
        target = share.recipe.target
        rows: list[tuple[int, ...]] = []
        for rank, layout in share.layouts:
            # Segments only need its dtype, and whether it is direct.
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
                    rows.append((*place, nbytes, part[-1], count))
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
                # In the worst case the largest computations run at once, one per thread.
                sum(sorted((one.scratch for one in computed), reverse=True)[:threads]),
            )
            for (of_rank, number, through_buffer), computed in zip(
                self._iter_counts(), self._computed, strict=True
            )
        ]

    def _iter_counts(self) -> Iterator[tuple[int, int, bool]]:
        """Yield bytes, reads and use of staging buffers of each rank, without computations."""
        world = len(self._number)
        # Some ranks at a time, since a table of all would take most of the memory.
        for ranks in (range(at, min(at + RANKS, world)) for at in range(0, world, RANKS)):
            kinds = (kind.place_rows(self._line, ranks) for kind in self._kinds.values())
            table = np.concatenate([np.empty((4, 0), np.int64), *kinds], axis=1)
            # Each rank has its own ``line``, longer than all files, so no read crosses ranks. Sort as
            # ``merge_reads`` does.
            place, nbytes, direct, _ = table = table[:, np.lexsort((table[2], table[1], table[0]))]
            starts = _find_starts(table, self._options)
            sizes = np.maximum.reduceat(place + nbytes, starts) - place[starts] if len(starts) else starts
            # Rows of one rank are adjacent: its sums are differences of running totals.
            bounds = np.searchsorted(place[starts], np.arange(len(ranks) + 1) * self._line)
            total = np.concatenate([[0], np.cumsum(sizes)])[bounds]
            staged = np.bincount(place[direct == 0] // self._line, minlength=len(ranks)) > 0
            yield from zip(np.diff(total).tolist(), np.diff(bounds).tolist(), staged.tolist(), strict=True)


def _find_starts(table: Numbers, options: PlanOptions) -> Numbers:
    """Return the rows with which reads start, as ``find_starts`` does."""
    place, nbytes, direct, rows = table
    gap = place[1:] - np.maximum.accumulate(place + nbytes)[:-1]
    # Most rows surely start a read: the next one is too far away, or too long to be added.
    widest = np.where(direct[1:] != 0, 0, max(options.gap_floor, int(options.gap_share * options.chunk_size)))
    sure = (gap > widest) | (place[1:] + nbytes[1:] - place[:-1] > options.chunk_size)
    sure |= (direct[1:] != direct[:-1]) | (rows[1:] != 1) | (rows[:-1] != 1)
    group = np.cumsum(np.concatenate([np.zeros(min(1, len(place)), np.int64), sure]))
    # Only among the others does it depend on the rows before.
    open_rows = np.flatnonzero(np.bincount(group)[group] > 1) if len(group) else group
    columns = (column[open_rows].tolist() for column in (group, place, nbytes, direct, rows))
    found = np.fromiter(find_starts(zip(*columns, strict=True), options), np.int64)
    return np.union1d(np.flatnonzero(np.diff(group, prepend=-1)), open_rows[found])
