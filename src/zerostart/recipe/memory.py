"""The memory that symbolic tensors are views of: what it holds, or the elements of a constant themselves."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from zerostart.geometry import row_major_strides
from zerostart.recipe.values import Value, constant
from zerostart.recipe.views import Layout, Step


class Memory:
    """One storage of eager torch, by the tensor that it was made for.

    A constant, which a conversion made itself, has its elements (``real``) until weights are written into it.
    """

    __slots__ = ("_fill", "_real", "_value", "dtype", "exported", "layout", "overlaps", "version")

    def __init__(self, layout: Layout, dtype: torch.dtype) -> None:
        self.layout = layout
        self.dtype = dtype
        #: Goes up with each write.
        self.version = 0
        #: Whether something outside sees, and may change, the elements.
        self.exported = False
        #: A tensor of the checkpoint that has other elements in the same place, which no write could reach.
        self.overlaps: str | None = None
        self._value: Value | None = None
        self._real: torch.Tensor | None = None
        self._fill: torch.Tensor | None = None

    @classmethod
    def holding(cls, value: Value, strides: Sequence[int] | None = None, offset: int = 0) -> Memory:
        """The memory of a tensor with ``value``, laid out by ``strides`` (None for row-major).

        It begins after ``offset`` elements, as the memory of a tensor that is a view may.
        """
        if strides is None and not offset:  # of most tensors of a checkpoint, of which there are many
            made = cls(_row_major(value.shape), value.dtype)
        else:
            steps = row_major_strides(value.shape) if strides is None else tuple(strides)
            made = cls(Layout(value.shape, steps, offset), value.dtype)
        made._value = value.lying(made.layout.strides)
        return made

    @classmethod
    def of_constant(cls, real: torch.Tensor) -> Memory:
        """The storage of a tensor that a conversion made."""
        made = cls(Layout(tuple(real.shape), real.stride(), int(real.storage_offset())), real.dtype)
        made._real = real
        return made

    @classmethod
    def filled(cls, like: torch.Tensor, fill: torch.Tensor) -> Memory:
        """The memory of a tensor like ``like`` (on meta) with the one element ``fill`` everywhere.

        It takes no memory until its elements are asked for.
        """
        made = cls(Layout(tuple(like.shape), like.stride(), 0), like.dtype)
        made._fill = fill
        return made

    @property
    def is_constant(self) -> bool:
        """Whether nothing of it comes from the checkpoint."""
        return self._real is not None or self._fill is not None

    @property
    def real(self) -> torch.Tensor | None:
        """The tensor that the memory was made for, with its elements, if it is a constant."""
        if self._real is None and self._fill is not None:
            layout = self.layout
            self._real = torch.empty_strided(
                layout.shape, layout.strides, dtype=self.dtype, device="cpu"
            ).copy_(self._fill)
            # Made once: from here on the tensor is what all views of this memory share.
            self._fill = None
        return self._real

    @property
    def value(self) -> Value:
        """What the memory holds now."""
        if self._real is not None and (self._value is None or self.exported):
            # A copy, since `real` may be written by torch itself later, and a value never changes.
            self._value = constant(self._real.clone()).lying(self.layout.strides)
        elif self._value is None:
            assert self._fill is not None, "a memory holds something"
            self._value = constant(self._fill.expand(self.layout.shape)).lying(self.layout.strides)
        return self._value

    def hold(self, value: Value) -> None:
        """Hold ``value`` from now on."""
        self._value, self._real, self._fill = value.lying(self.layout.strides), None, None
        self.version += 1

    def touch(self) -> None:
        """Note that an operator has changed the elements of a constant."""
        self._value = None
        self.version += 1

    def copy(self) -> Memory:
        """A memory of its own with the same contents."""
        made = Memory(self.layout, self.dtype)
        made._value = self.value
        made._real = None if self._real is None else self._real.clone()
        made._fill = self._fill
        made.version, made.overlaps = self.version, self.overlaps
        return made


class Symbol(Protocol):
    """``SymbolicTensor``, as the operators see it, which are imported by its module."""

    memory: Memory
    steps: tuple[Step, ...]

    def __init__(
        self, memory: Memory, steps: tuple[Step, ...] = (), meta: torch.Tensor | None = None
    ) -> None: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        ...

    @property
    def shape(self) -> torch.Size:
        """Of the view."""
        ...

    def become(self, other: Any) -> None:
        """Be another view."""
        ...

    def is_conj(self) -> bool:
        """Whether the conjugate is shown of what the memory holds."""
        ...

    def is_neg(self) -> bool:
        """Whether the negative is shown of what the memory holds."""
        ...

    @property
    def meta(self) -> torch.Tensor:
        """The twin on the meta device."""
        ...

    @property
    def value(self) -> Value:
        """What the tensor holds now."""
        ...

    @property
    def elements(self) -> torch.Tensor | None:
        """The elements of a constant."""
        ...


@functools.lru_cache(maxsize=4096)
def _row_major(shape: tuple[int, ...]) -> Layout:
    """That of a tensor by itself; a checkpoint has thousands of tensors of a few shapes."""
    return Layout(shape, row_major_strides(shape), 0)
