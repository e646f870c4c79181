"""Computed tensors: what a conversion calculates, and does not only move.

A computed tensor is one operator with its operands. Where the operator works element by element (torch tags
it ``pointwise``), any box of the result needs the same box of each operand, so that it can be evaluated in
chunks over the smallest region of the checkpoint; any other operator needs its operands whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_unflatten

from zerostart.geometry import Box, Piece, reshape

__all__ = ["Computed", "Operand", "leaves_of"]


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that a computation takes: pieces that tile ``shape``, to be read or computed as ``dtype``."""

    pieces: tuple[Piece, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def split(self, factors: Sequence[Sequence[int]]) -> Operand:
        """The operand with its dimensions split like those of the result that it is broadcast to."""
        shape: list[int] = []
        for size, parts in zip(self.shape, factors[len(factors) - len(self.shape) :], strict=True):
            shape += parts if size != 1 else [1] * len(parts)
        if tuple(shape) == self.shape:
            return self
        return Operand(reshape(self.pieces, self.shape, shape), tuple(shape), self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """The result of ``function``, in the place of a checkpoint tensor; compared by identity.

    ``function`` is an ATen operator, or None for a constant (``value``) that the conversion made. Its
    arguments are ``rest`` in the tree ``spec``, with the operands, evaluated, in the places ``at``.
    ``aligned`` tells for each operand whether a box of the result needs only the same box of it; the others
    are needed whole. ``output`` picks one of several results.
    """

    function: Callable[..., Any] | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    operands: tuple[Operand, ...] = ()
    at: tuple[int, ...] = ()
    aligned: tuple[bool, ...] = ()
    rest: tuple[Any, ...] = ()
    spec: TreeSpec | None = None
    output: int | None = None
    elementwise: bool = True
    value: torch.Tensor | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"the result of {self.function}" if self.function else "a constant"

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def whole(self) -> bool:
        """Whether any part of the result needs an operator that cannot be evaluated box by box."""
        return not self.elementwise or any(
            isinstance(source, Computed) and source.whole
            for operand in self.operands
            for piece in operand.pieces
            for source in piece.source
        )

    def bytes_per_element(self) -> int:
        """Memory that evaluating one element takes: its own, and that of everything it is made from."""
        own = self.dtype.itemsize
        for operand, aligned in zip(self.operands, self.aligned, strict=True):
            if aligned and prod(operand.shape) > 1:
                inner = [
                    source.bytes_per_element()
                    for piece in operand.pieces
                    for source in piece.source[:1]
                    if isinstance(source, Computed)
                ]
                own += operand.dtype.itemsize + max(inner, default=0)
        return own

    def evaluate(
        self, operands: Sequence[torch.Tensor], box: Box, factors: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """The elements of ``box`` (of the shape split by ``factors``) from the operands' regions for it."""
        if self.function is None:
            assert self.value is not None, "a constant has a value"
            split = [size for parts in factors for size in parts]
            made = self.value.reshape(split)
            for dim, (origin, extent) in enumerate(zip(box.origin, box.extent, strict=True)):
                made = made.narrow(dim, origin, extent)
            return made
        filled = list(self.rest)
        for place, operand in zip(self.at, operands, strict=True):
            filled[place] = operand
        assert self.spec is not None, "an operator has arguments"
        args, kwargs = tree_unflatten(filled, self.spec)
        with torch.no_grad():
            made = self.function(*args, **kwargs)
        result: torch.Tensor = made if self.output is None else made[self.output]
        return result


def leaves_of(pieces: Sequence[Piece]) -> set[str]:
    """Names of the checkpoint tensors that ``pieces`` are read from, by way of computations or not."""
    names: set[str] = set()
    seen: set[int] = set()
    todo: list[object] = [source for piece in pieces for source in piece.source]
    while todo:
        source = todo.pop()
        if not isinstance(source, Computed):
            names.add(str(source))
        elif id(source) not in seen:
            seen.add(id(source))
            todo += [s for operand in source.operands for piece in operand.pieces for s in piece.source]
    return names
