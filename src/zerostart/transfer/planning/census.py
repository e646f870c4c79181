"""Count the reads of every rank at once, for large worlds.

Layers repeat: parameters of one kind are cut into segments once for each rank, as in ``join``. All others of
that kind are then arithmetic on arrays.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

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

    def place_rows(self, line: int) -> Numbers:
        """Return rows ``place, bytes, direct, rows`` of all parameters."""
        rank, source, offset, *rest = self.table
        place = np.array(self.sources, np.int64)[:, source] + (rank * line + offset)
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
                    rows.append((*place, nbytes, part.direct, count))
            for computation in plan_computations(self._tensors, to_compute, 0, self._options):
                reads = computation.reads
                staged = any(not read.direct for read in reads)
                counted = Count(sum(read.nbytes for read in reads), len(reads), staged, computation.nbytes)
                self._computed[self._number[rank]].append(counted)
        return np.array(rows, np.int64).reshape(-1, 6).T

    def counts(self, threads: int) -> list[Count]:
        world = len(self._number)
        tables = [np.empty((4, 0), np.int64), *(kind.place_rows(self._line) for kind in self._kinds.values())]
        table = np.concatenate(tables, axis=1)
        # Each rank has its own ``line``, longer than all files, so no read crosses ranks. Sort as
        # ``merge_reads`` does.
        table = table[:, np.lexsort((table[2], table[1], table[0]))]
        place, nbytes, direct, rows = table
        firsts = find_starts(_iter_rows(place // self._line, place, nbytes, direct != 0, rows), self._options)
        starts = np.fromiter(firsts, np.int64)
        sizes = np.maximum.reduceat(place + nbytes, starts) - place[starts] if len(starts) else starts
        # Rows of one rank are adjacent: its sums are differences of running totals.
        bounds = np.searchsorted(place[starts], np.arange(world + 1) * self._line)
        total = np.concatenate([[0], np.cumsum(sizes)])[bounds]
        staged = np.bincount(place[direct == 0] // self._line, minlength=world) > 0
        return [
            Count(
                of_rank + sum(one.nbytes for one in computed),
                number + sum(one.reads for one in computed),
                through_buffer or any(one.staged for one in computed),
                # In the worst case the largest computations run at once, one per thread.
                sum(sorted((one.scratch for one in computed), reverse=True)[:threads]),
            )
            for of_rank, number, through_buffer, computed in zip(
                np.diff(total).tolist(),
                np.diff(bounds).tolist(),
                staged.tolist(),
                self._computed,
                strict=True,
            )
        ]


def _iter_rows(*columns: npt.NDArray[Any]) -> Iterator[tuple[Any, ...]]:
    # Python's numbers make the loop fast, but take ten times the memory, so convert some at a time.
    for start in range(0, len(columns[0]), 1 << 16):
        yield from zip(*(column[start : start + (1 << 16)].tolist() for column in columns), strict=True)
