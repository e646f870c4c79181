"""What tells that bytes have arrived: digest sums of sets of an image's elements, by tensor.

A sum over some elements of a tensor counts their places in it, and sums of disjoint sets add up
(``checkpoint/digest.py``). So trainer ranks sum what they have of a worker's elements, the worker sums what
its parameters hold, and the two agree if each element is there with its bits.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import torch

from zerostart.checkpoint.catalog import DTYPE_BITS
from zerostart.checkpoint.digest import Digests, Ranks
from zerostart.errors import CheckpointError
from zerostart.state.refitting.image import Image
from zerostart.transfer.planning.runs import Runs

#: By tensor the lanes of its digest over the elements of a set, and how many they are.
Sums = Mapping[str, Sequence[int]]


class Tensors:
    """Which tensor of an image a byte belongs to."""

    def __init__(self, image: Image) -> None:
        entries = sorted(image.layout.tensors.values(), key=lambda entry: entry.offset)
        self._entries = [entry for entry in entries if entry.nbytes]
        self._starts = [entry.offset for entry in self._entries]

    def rows(self, runs: Runs) -> Iterator[tuple[str, int, int, int, int]]:
        """``runs`` by tensor: (name, first element, elements, distance from row to row, rows)."""
        for start, width, stride, count in runs.rows.tolist():
            while count:
                entry = self._entries[bisect_right(self._starts, start) - 1]
                size, end = DTYPE_BITS[entry.dtype] // 8, entry.offset + entry.nbytes
                first = (start - entry.offset) // size
                if count == 1:
                    taken = min(width, end - start)
                    yield entry.name, first, taken // size, taken // size, 1
                    start, width, count = start + taken, width - taken, int(taken < width)
                    continue
                # As many rows as lie in this tensor; one that goes on in the next is cut as a run.
                many = min(count, max(0, (end - start - width) // stride + 1))
                if many:
                    yield entry.name, first, width // size, stride // size, many
                else:
                    yield entry.name, first, (end - start) // size, (end - start) // size, 1
                    yield from self.rows(Runs.of([(end, start + width - end, 0, 1)]))
                    many = 1
                start, count = start + many * stride, count - many

    def names(self, runs: Runs) -> list[str]:
        """The tensors that ``runs`` has bytes of, in the order of the image."""
        found = {name for name, *_ in self.rows(runs)}
        return [entry.name for entry in self._entries if entry.name in found]


class SetSums:
    """The sums of several sets of an image's elements, over what a rank has of each."""

    def __init__(self, image: Image, sets: Sequence[Runs]) -> None:
        self._image = image
        self._sets = sets
        #: By set what a row of a write has of it: element, elements, distance and rows, from the write's
        #: first.
        self._met: dict[tuple[str, int, int, int, int], list[tuple[int, int, int, int, int]]] = {}
        self.begin()

    @cached_property
    def _names(self) -> list[list[str]]:
        tensors = Tensors(self._image)
        return [tensors.names(runs) for runs in self._sets]

    def begin(self) -> None:
        """Forget what was added."""
        entries = {name: (name, dtype, shape) for name, dtype, shape in self._image.entries}
        self._digests = [Digests(entries[name] for name in names) for names in self._names]

    def add_rows(self, name: str, first: int, step: int, data: torch.Tensor) -> None:
        """Add rows of a tensor, as ``Digests.add_rows``; called from several threads."""
        rows, count = data.shape
        key = (name, first, step, rows, count)
        # Worked out once: each push writes the same.
        if (met := self._met.get(key)) is None:
            met = self._met[key] = list(self._meet(*key))
        for number, low, wide, apart, many in met:
            part = data.as_strided((many, wide), (apart, 1), int(data.storage_offset()) + low)
            self._digests[number].add_rows(name, first + low, apart, part)

    def _meet(
        self, name: str, first: int, step: int, rows: int, count: int
    ) -> Iterator[tuple[int, int, int, int, int]]:
        entry = self._image.layout.tensors[name]
        size = DTYPE_BITS[entry.dtype] // 8
        begin = entry.offset + first * size
        mine = Runs.of([(begin, count * size, step * size if rows > 1 else 0, rows)])
        for number, wanted in enumerate(self._sets):
            for start, width, stride, many in wanted.intersect(mine).rows.tolist():
                yield number, (start - begin) // size, width // size, (stride or width) // size, many

    def summed(self, world: Ranks | None) -> list[dict[str, tuple[int, ...]]]:
        """The sums of each set over all ranks; collective, one reduction for each set.

        Raises CheckpointError where the ranks together have not every element of a set.
        """
        found = []
        for runs, digests in zip(self._sets, self._digests, strict=True):
            sums = digests.sums(world)
            sizes = {name: DTYPE_BITS[self._image.layout.tensors[name].dtype] // 8 for name in sums}
            added = sum(row[-1] * sizes[name] for name, row in sums.items())
            if added != runs.nbytes:
                raise CheckpointError(
                    f"{added} bytes were summed up of {runs.nbytes} that workers take; this is a bug in "
                    f"zerostart"
                )
            found.append(sums)
        return found


def differing(expected: Sums, found: Sums) -> list[str]:
    """Names of the tensors whose sums are not the same."""
    names = dict.fromkeys([*expected, *found])
    return [name for name in names if list(expected.get(name, ())) != list(found.get(name, ()))]


def digest_of(sums: Sequence[Sums]) -> str:
    """One digest over the sums of several sets."""
    text = repr([sorted((name, *row) for name, row in each.items()) for each in sums])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
