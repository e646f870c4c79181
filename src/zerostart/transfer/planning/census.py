"""Counting the reads of every rank at once, for worlds too large to plan rank by rank.

Layers repeat: parameters that are made alike of checkpoint tensors, and are cut alike, are read alike, from
other places. So each kind of parameter is pulled back and cut into segments once for every rank, as ``join``
does it, and what is left for the parameters of that kind is arithmetic on arrays.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from zerostart.checkpoint.catalog import Catalog
from zerostart.checkpoint.storage import Rows
from zerostart.geometry import Copy
from zerostart.geometry.layout import Layout
from zerostart.recipe import Computed, Recipe
from zerostart.transfer.planning.computing import computations
from zerostart.transfer.planning.join import pull_back
from zerostart.transfer.planning.plan import Computation, Destination, Read
from zerostart.transfer.planning.reads import Numbers, PlanOptions, read_starts_of_many, segments

#: Rows ``file, begin, end, bytes, reads`` of one rank: the first byte that it reads of each file, one past
#: the last, and how many bytes in how many reads.
Extents = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Share:
    """A recipe, and the layouts of its parameter on the ranks that hold some of it, with the ranks.

    Shares with the very same ``layouts`` (one object) are cut alike. ``direct`` tells host memory, where
    reads of the stored dtype land in place.
    """

    recipe: Recipe
    layouts: Sequence[tuple[int, Layout]]
    direct: bool


@dataclass(frozen=True, slots=True)
class Count:
    """One rank's reads: their bytes and number, whether any goes through a staging buffer, and computations.

    ``scratch`` is the most memory that computations take at a time. ``files`` says of each file that is read
    from where to where.
    """

    nbytes: int
    reads: int
    staged: bool
    scratch: int = 0
    files: Extents = field(default_factory=lambda: extents_of([]), compare=False)
    #: Requests to the storage, and the bytes that they give, where rows of a read take one or several.
    requests: int = 0
    fetched: int = 0


def extents_of(reads: Iterable[tuple[int, int, int, int]]) -> Extents:
    """What ``reads`` of one rank (file, begin, end, bytes) take of each file, by ascending number."""
    rows = np.array(list(reads), np.int64).reshape(-1, 4).T
    keys, begin, end, nbytes, number = _grouped(rows[0], *rows[1:])
    return np.stack([keys, begin, end, nbytes, number], axis=1)


def _grouped(key: Numbers, begin: Numbers, end: Numbers, nbytes: Numbers) -> tuple[Numbers, ...]:
    """Of each key, ascending: itself, the least begin, the greatest end, the sum of bytes, how many."""
    order = np.argsort(key, kind="stable")
    key, begin, end, nbytes = key[order], begin[order], end[order], nbytes[order]
    first = np.flatnonzero(np.diff(key, prepend=-1))
    if not len(first):
        return key, begin, end, nbytes, nbytes
    return (
        key[first],
        np.minimum.reduceat(begin, first),
        np.maximum.reduceat(end, first),
        np.add.reduceat(nbytes, first),
        np.diff(first, append=len(key)),
    )


def requests_of(reads: Iterable[Read], gap: int) -> tuple[int, int]:
    """Requests that ``reads`` take where such a gap is read through, and the bytes that they give."""
    rows = [Rows(read.rows, read.nbytes // read.rows, read.stride) for read in reads]
    return sum(sum(1 for _ in one.extents(gap)) for one in rows), sum(one.fetched(gap) for one in rows)


def count_reads(
    catalog: Catalog, shares: Iterable[Share], ranks: Sequence[int], options: PlanOptions, threads: int
) -> list[Count]:
    """The reads that the plan of each of ``ranks`` has, whose computations run on ``threads``."""
    census = _Census(catalog, ranks, options)
    for share in shares:
        census.add(share)
    return census.counts(threads)


@dataclass(frozen=True)
class _Kind:
    """Segments of the parameters of one kind, from where the tensors begin that they come from."""

    #: Columns: rank (by its number among those counted), source, offset, bytes, direct, rows, and extent, the
    #: bytes from the first that is read to the last with the gaps between rows.
    table: Numbers
    #: For each parameter where each of its sources begins, files being one after the other.
    sources: list[list[int]] = field(default_factory=list)

    def placed(self, line: int) -> Numbers:
        """Rows ``place, bytes, direct, rows, extent`` of all parameters; ranks have ``line`` each."""
        rank, source, offset, *rest = self.table
        place = np.array(self.sources, np.int64)[:, source] + (rank * line + offset)
        return np.stack([place.ravel(), *(np.tile(column, len(self.sources)) for column in rest)])


@dataclass
class _Computed:
    """The reads of one rank's computations, and the ``memory`` that each takes while it runs."""

    nbytes: int = 0
    reads: int = 0
    requests: int = 0
    fetched: int = 0
    staged: bool = False
    memory: list[int] = field(default_factory=list)
    places: list[tuple[int, int, int, int]] = field(default_factory=list)

    def add(self, computation: Computation, gap: int) -> None:
        asked, got = requests_of(computation.reads, gap)
        self.requests, self.fetched = self.requests + asked, self.fetched + got
        self.nbytes += sum(read.nbytes for read in computation.reads)
        self.reads += len(computation.reads)
        self.staged |= any(not read.direct for read in computation.reads)
        self.memory.append(computation.nbytes)
        self.places += [(read.file, read.offset, read.end, read.nbytes) for read in computation.reads]


class _Census:
    """Gathers shares by kind, and what has to be computed, which is planned one by one."""

    def __init__(self, catalog: Catalog, ranks: Sequence[int], options: PlanOptions) -> None:
        self._tensors = catalog.tensors
        self._options = options
        self._gap = catalog.storage.gap
        self._number = {rank: number for number, rank in enumerate(ranks)}
        self._kinds: dict[Hashable, _Kind] = {}
        self._computed = [_Computed() for _ in ranks]
        # More than a chunk between files, so that nothing is merged across their ends.
        ends = np.cumsum(np.array([0, *catalog.sizes], np.int64) + options.chunk_size + 1).tolist()
        self._files, self._line = ends[:-1], ends[-1]

    def add(self, share: Share) -> None:
        """Count what ``share`` has every rank read."""
        names = [str(s) for p in share.recipe.pieces for s in p.source if not isinstance(s, Computed)]
        number = {name: n for n, name in enumerate(dict.fromkeys(names))}
        entries = [self._tensors[name] for name in number]
        # Parameters are of one kind if their pieces lie alike, whatever tensors they come from: these are
        # told by number, not by name. A computed one is of a kind of its own: its steps are not compared.
        key: Hashable = share.recipe
        if not share.recipe.computed:
            key = (
                tuple((p.origin, p.axes, p.unit, p.offset, len(p.source)) for p in share.recipe.pieces),
                tuple(number[name] for name in names),
                tuple(entry.dtype for entry in entries),
                share.recipe.target.dtype,
            )
        # The identity of the layouts: comparing those of thousands of ranks would take longer than counting
        # them. The caller keeps them alive for as long as the census.
        key = (key, id(share.layouts), share.direct)
        if key not in self._kinds:
            self._kinds[key] = _Kind(self._table(share, number))
        self._kinds[key].sources.append([self._files[entry.file] + entry.offset for entry in entries])

    def _table(self, share: Share, number: dict[str, int]) -> Numbers:
        target = share.recipe.target
        rows: list[tuple[int, ...]] = []
        for rank, layout in share.layouts:
            # Segments ask of a destination only its dtype and whether it is direct.
            to = Destination(target.name, layout.numel, layout.owned, target.dtype, share.direct)
            to_compute: list[Copy] = []
            for copy in pull_back(share.recipe, layout):
                if isinstance(copy.source, Computed):
                    to_compute.append(copy)
                    continue
                source = str(copy.source)
                base = self._tensors[source].offset
                found = segments(self._tensors, copy, 0, to, self._options)
                for _, offset, nbytes, part, count, stride in found:
                    place = (self._number[rank], number[source], offset - base)
                    extent = (count - 1) * stride + nbytes // count
                    rows.append((*place, nbytes, part.direct, count, extent))
            for computation in computations(self._tensors, to_compute, 0, self._options):
                self._computed[self._number[rank]].add(computation, self._gap)
        return np.array(rows, np.int64).reshape(-1, 7).T

    def counts(self, threads: int) -> list[Count]:
        """What each rank reads."""
        world = len(self._number)
        tables = [np.empty((5, 0), np.int64), *(kind.placed(self._line) for kind in self._kinds.values())]
        table = np.concatenate(tables, axis=1)
        # Each rank has a ``line`` of its own, longer than all files together: one sort of all rows leaves
        # those of a rank together, and no read reaches from one rank's to the next one's.
        # By place to the last digit, as ``merged_reads`` has them.
        table = table[:, np.lexsort((table[2], table[1], table[0]))]
        place, nbytes, direct, rows, extent = table
        starts = read_starts_of_many(place, nbytes, direct, rows, self._options)
        sizes = np.maximum.reduceat(place + nbytes, starts) - place[starts] if len(starts) else starts
        # The rows of one rank follow each other.
        # Reads and bytes of a rank are differences of the running totals at its bounds.
        bounds = np.searchsorted(place[starts], np.arange(world + 1) * self._line)
        total = np.concatenate([[0], np.cumsum(sizes)])[bounds]
        ends = np.maximum.reduceat(place + extent, starts) if len(starts) else starts
        files = self._extents(place[starts], ends, sizes)
        asked, got = self._requests(nbytes[starts], rows[starts], extent[starts], sizes)
        asked, got = (np.concatenate([[0], np.cumsum(of)])[bounds] for of in (asked, got))
        staged = np.bincount(place[direct == 0] // self._line, minlength=world) > 0
        return [
            Count(
                of_rank + computed.nbytes,
                number + computed.reads,
                through_buffer or computed.staged,
                # At worst the largest computations run at once, one on each thread.
                sum(sorted(computed.memory, reverse=True)[:threads]),
                extents,
                requests + computed.requests,
                fetched + computed.fetched,
            )
            for of_rank, number, through_buffer, computed, extents, requests, fetched in zip(
                np.diff(total).tolist(),
                np.diff(bounds).tolist(),
                staged.tolist(),
                self._computed,
                files,
                np.diff(asked).tolist(),
                np.diff(got).tolist(),
                strict=True,
            )
        ]

    def _requests(self, nbytes: Numbers, rows: Numbers, extent: Numbers, sizes: Numbers) -> list[Numbers]:
        """How many requests each read takes, and the bytes that they give; see ``Rows.extents``."""
        width = nbytes // np.maximum(rows, 1)
        stride = (extent - width) // np.maximum(rows - 1, 1)
        apart = (rows > 1) & (stride - width > self._gap)
        return [np.where(apart, rows, 1), np.where((rows > 1) & ~apart, extent, sizes)]

    def _extents(self, begin: Numbers, end: Numbers, nbytes: Numbers) -> list[Extents]:
        """What each rank reads of each file: of reads at these places, and of its computations."""
        many = len(self._files)
        rank, at = np.divmod(begin, self._line)
        base = np.array(self._files, np.int64)
        file = np.searchsorted(base, at, side="right") - 1
        offset = at - base[file]
        plain = np.stack([rank * many + file, offset, offset + end - begin, nbytes])
        computed = [
            (number * many + file, *place)
            for number, of_rank in enumerate(self._computed)
            for file, *place in of_rank.places
        ]
        every = np.concatenate([plain, np.array(computed, np.int64).reshape(-1, 4).T], axis=1)
        key, *columns = _grouped(*every)
        rank, file = np.divmod(key, max(1, many))
        table = np.stack([file, *columns], axis=1)
        return np.split(table, np.searchsorted(rank, np.arange(1, len(self._number))))
