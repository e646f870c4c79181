"""Computed tensors: what a conversion calculates, and does not only move.

A computed tensor is one operator with its operands. ``Cut`` tells which parts of the result can be had
without the rest and have the bits that eager torch gives them; how an operator is classed is in ``bits``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_unflatten

from zerostart.geometry import Box, Piece, reshape
from zerostart.upstream.torch.types import Arguments

#: Elements of a block. torch's loops take full vectors, two at a time, and give what is left at the end to
#: another routine, which may round otherwise. A block is a multiple of any such step (two vectors of bytes,
#: of the 2048 bits that no processor exceeds), so that its elements are in the vectors they are in eagerly.
BLOCK = 1024


class Cut(Enum):
    """Which parts of a result can be computed without the rest, bit for bit."""

    #: In whatever box, from the same box of the operands.
    BOXES = "boxes"
    #: Runs of the memory order that begin and end where blocks do, from the same runs of the operands.
    BLOCKS = "blocks"
    #: Nothing less than all of it, from whole operands in the strides that they have in eager torch.
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that a computation takes, to be read or computed."""

    #: They tile ``shape``.
    pieces: tuple[Piece, ...]
    shape: tuple[int, ...]
    #: The one that it is read or computed as.
    dtype: torch.dtype
    #: Those of the tensor in eager torch, in elements; None for row-major.
    strides: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def computed(self) -> set[Computed]:
        """What its elements are computed by, as far as they are."""
        return {s for piece in self.pieces for s in piece.source if isinstance(s, Computed)}

    @property
    def from_blocks(self) -> bool:
        """Whether any of it is computed in blocks, or made from what is."""
        return any(source.cut is Cut.BLOCKS or source.from_blocks for source in self.computed)

    @property
    def across_blocks(self) -> bool:
        """Whether a run of it takes parts of many blocks, as where it is transposed."""
        return self.from_blocks and (
            any(source.across_blocks for source in self.computed)
            or not all(_ascends(piece) for piece in self.pieces)
        )

    def split(self, factors: Sequence[Sequence[int]]) -> Operand:
        """The operand, row-major, with its dimensions split like those of the result it is broadcast to."""
        shape: list[int] = []
        for size, parts in zip(self.shape, factors[len(factors) - len(self.shape) :], strict=True):
            shape += parts if size != 1 else [1] * len(parts)
        return Operand(reshape(self.pieces, self.shape, shape), tuple(shape), self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """The result of an operator, in the place of a checkpoint tensor; compared by identity."""

    #: An ATen operator; None for a constant (``value``) that the conversion made.
    function: Callable[..., Any] | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    operands: tuple[Operand, ...] = ()
    #: Places of the operands among the leaves of ``spec``.
    at: tuple[int, ...] = ()
    #: For each operand whether a part of the result needs only the same part of it; the others are needed
    #: whole.
    aligned: tuple[bool, ...] = ()
    #: All other arguments, in the tree ``spec``.
    rest: Arguments = ()
    spec: TreeSpec | None = None
    #: Which of several results it is; None where there is one.
    output: int | None = None
    cut: Cut = Cut.BOXES
    #: If given, the dimensions of what the function gives in the order in which they lie in memory, which is
    #: that of ``shape``.
    order: tuple[int, ...] | None = None
    value: torch.Tensor | None = field(default=None, repr=False)
    #: Whether any part of the result needs an operator that has to be computed whole.
    whole: bool = field(init=False)
    #: Whether anything that the result is made from is computed in blocks, and whether these lie across it.
    from_blocks: bool = field(init=False)
    across_blocks: bool = field(init=False)
    #: Memory that evaluating one element takes: its own, and that of everything it is made from.
    element_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        """Sum up what it is made from, once: a chain of computations may be long, and share its parts."""
        whole, nbytes = self.cut is Cut.WHOLE, self.dtype.itemsize
        for operand, aligned in zip(self.operands, self.aligned, strict=True):
            made = operand.computed
            whole |= any(source.whole for source in made)
            if aligned and operand.numel > 1:
                nbytes += operand.dtype.itemsize + max((source.element_bytes for source in made), default=0)
        object.__setattr__(self, "whole", whole)
        object.__setattr__(self, "from_blocks", any(operand.from_blocks for operand in self.operands))
        object.__setattr__(self, "across_blocks", any(operand.across_blocks for operand in self.operands))
        object.__setattr__(self, "element_bytes", nbytes)

    def __str__(self) -> str:
        return f"the result of {self.function}" if self.function else "a constant"

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

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
        return result if self.order is None else result.permute(self.order)


def _ascends(piece: Piece) -> bool:
    """Whether the addresses of a piece ascend in the order of its elements; repetition aside."""
    digits = [digit for axis in piece.axes for digit in axis if digit[0] > 1 and digit[1]]
    return all(outer[1] >= inner[0] * inner[1] for outer, inner in pairwise(digits))


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
