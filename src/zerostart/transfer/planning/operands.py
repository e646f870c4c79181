"""Operands of computations while these are planned: which of their pieces fill a box.

One operand is asked for many boxes, and may have as many pieces: so its pieces are sorted once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

from zerostart.geometry import Box, Copy, Piece, copies_between, merge_runs, row_major_strides
from zerostart.recipe import Operand

Factors = tuple[tuple[int, ...], ...]


class Operands:
    """Operands by identity, each sorted, and split, once; equal ones are one."""

    def __init__(self) -> None:
        # Operands are keys by what they hold, which takes as long to hash as they have pieces.
        self._equal: dict[Operand, Operand] = {}
        self._known: dict[int, tuple[Operand, Operand]] = {}
        self._split: dict[tuple[int, Factors], Operand] = {}
        self._sorted: dict[int, _Sorted] = {}

    def one(self, operand: Operand) -> Operand:
        """The operand itself, or the equal one that was there before; it stays as long as this does."""
        if id(operand) not in self._known:
            self._known[id(operand)] = (operand, self._equal.setdefault(operand, operand))
        return self._known[id(operand)][1]

    def split(self, operand: Operand, factors: Sequence[Sequence[int]]) -> Operand:
        """The operand with its dimensions split like those of a result, see ``Operand.split``."""
        key = (id(self.one(operand)), tuple(tuple(parts) for parts in factors))
        if key not in self._split:
            self._split[key] = self.one(operand.split(factors))
        return self._split[key]

    def copies(self, operand: Operand, boxes: Iterable[Box], strides: Sequence[int] | None) -> list[Copy]:
        """The copies that lay ``boxes`` down one after the other, each row-major or with ``strides``."""
        operand = self.one(operand)
        if id(operand) not in self._sorted:
            self._sorted[id(operand)] = _Sorted(operand.pieces)
        pieces = self._sorted[id(operand)]
        found: list[Copy] = []
        to = 0
        for box in boxes:
            if box.numel:
                steps = row_major_strides(box.extent) if strides is None else strides
                for piece in pieces.meeting(box):
                    found += copies_between(piece, box, to, steps)
            to += box.numel
        return merge_runs(found)


class _Sorted:
    """Pieces by where they begin in the dimension in which they begin at most places."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        dims = range(len(pieces[0].origin)) if pieces else range(0)
        self._dim = max(dims, key=lambda dim: len({piece.origin[dim] for piece in pieces}), default=None)
        self._pieces = list(pieces)
        if self._dim is None:
            return
        dim = self._dim
        self._pieces.sort(key=lambda piece: piece.origin[dim])
        self._first = [piece.origin[dim] for piece in self._pieces]
        # Where the furthest of all pieces up to one ends: it ascends too.
        self._last = list(accumulate((p.origin[dim] + p.extent[dim] for p in self._pieces), max))

    def meeting(self, box: Box) -> Sequence[Piece]:
        """The pieces that may have elements in common with ``box``."""
        if self._dim is None:
            return self._pieces
        low = box.origin[self._dim]
        begin = bisect_right(self._last, low)
        return self._pieces[begin : bisect_left(self._first, low + box.extent[self._dim])]
