"""Computed tensors: the result of an operator that does more than move elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_unflatten

from zerostart.geometry import Box, Piece, reshape
from zerostart.upstream.types import Arguments


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
    #: True if each box of the result can be computed by itself, bit for bit. All else is computed whole, from
    #: operands in the strides of eager torch.
    exact: bool = True
    value: torch.Tensor | None = field(default=None, repr=False)
    #: Whether any part of the result needs an operator that has to be computed whole.
    whole: bool = field(init=False)
    #: Memory that evaluating one element takes: its own, and that of everything it is made from.
    element_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        """Sum up what it is made from, once: a chain of computations may be long, and share its parts."""
        whole, nbytes = not self.exact, self.dtype.itemsize
        for operand, aligned in zip(self.operands, self.aligned, strict=True):
            made = operand.computed
            whole |= any(source.whole for source in made)
            if aligned and operand.numel > 1:
                nbytes += operand.dtype.itemsize + max((source.element_bytes for source in made), default=0)
        object.__setattr__(self, "whole", whole)
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
