"""What a symbolic tensor holds: pieces of the checkpoint and of what is computed from it, in a shape.

A value never changes; a tensor that is written into gets another. Operators that move elements make a value
by changing pieces (``operators``); all others make a computed one, whose elements the pieces then refer to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from zerostart import geometry
from zerostart.errors import ConversionError
from zerostart.recipe.computed import Computed, Operand, leaves_of
from zerostart.recipe.dtypes import holds
from zerostart.recipe.refusals import refusal

__all__ = ["HANDLERS", "Value", "compute", "constant", "depends_on_values", "names_of"]

aten = torch.ops.aten
#: By operator: what it does to values (``operators`` and ``views`` fill it).
HANDLERS: dict[Any, Callable[..., Any]] = {}


class Value:
    """Elements by their source addresses: ``pieces`` that tile ``shape``.

    ``stored`` are the dtypes that the elements are kept in, before the cast to ``dtype``.
    """

    __slots__ = ("dtype", "pieces", "shape", "stored")

    def __init__(
        self,
        pieces: Sequence[geometry.Piece],
        shape: Sequence[int],
        dtype: torch.dtype,
        stored: frozenset[torch.dtype] | None = None,
    ) -> None:
        self.pieces = tuple(pieces)
        self.shape = tuple(shape)
        self.dtype = dtype
        self.stored = stored or frozenset((dtype,))

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def as_operand(self) -> Operand:
        """What a computation needs to know of it."""
        return Operand(self.pieces, self.shape, self.dtype)

    def rounds(self, dtype: torch.dtype) -> bool:
        """Whether the value's own dtype loses what the stored elements, cast to ``dtype``, might keep."""
        return dtype != self.dtype and any(not holds(self.dtype, stored) for stored in self.stored)

    @classmethod
    def of(cls, source: Computed) -> Value:
        """What ``source`` computes."""
        return cls(geometry.whole(source, source.shape), source.shape, source.dtype)


def constant(tensor: torch.Tensor) -> Value:
    """A tensor with elements, which a conversion made itself; it must not change afterwards."""
    tensor = tensor.detach()
    return Value.of(Computed(None, tuple(tensor.shape), tensor.dtype, value=tensor))


def compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any = None) -> Any:
    """The result of an operator that does more than move elements, of arguments with values for tensors.

    ``made`` is what the operator gives on the meta device, where that is known. Raises ConversionError for
    an operator whose result is random or depends on the elements in a way that a shape cannot say.
    """
    if torch.Tag.nondeterministic_seeded in func.tags:
        raise refusal(f"the conversion of {names_of(args, kwargs)} calls {func}, which is random")
    if made is None:
        made = func(*tree_map(_empty, args), **tree_map(_empty, kwargs))
    flat, spec = tree_flatten((args, kwargs))
    at = tuple(i for i, value in enumerate(flat) if isinstance(value, Value))
    operands = tuple(flat[i].as_operand() for i in at)
    rest = tuple(None if i in at else value for i, value in enumerate(flat))
    elementwise, aligned = _regions(func, operands, made)

    def result(meta: torch.Tensor, output: int | None) -> Value:
        return Value.of(
            Computed(
                function=func,
                shape=tuple(meta.shape),
                dtype=meta.dtype,
                operands=operands,
                at=at,
                aligned=aligned,
                rest=rest,
                spec=spec,
                output=output,
                elementwise=elementwise,
            )
        )

    if isinstance(made, torch.Tensor):
        return result(made, None)
    return type(made)(result(meta, number) for number, meta in enumerate(made))


def _empty(value: Any) -> Any:
    """A value as a tensor on the meta device; anything else as it is."""
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Value) else value


def depends_on_values(func: Any, *arguments: Any) -> ConversionError:
    """The error for an operator whose result depends on the elements of ``arguments``."""
    return refusal(
        f"the conversion of {names_of(*arguments)} calls {func}, whose result depends on the values of the "
        "weights; a conversion has to do the same whatever they are"
    )


def _regions(func: Any, operands: Sequence[Operand], made: Any) -> tuple[bool, tuple[bool, ...]]:
    """Whether ``func`` can be evaluated box by box, and which operands then are needed only for the box."""
    if func is aten.view.dtype:
        return made.dtype.itemsize == operands[0].dtype.itemsize, (True,)
    if func is aten.index.Tensor and len(operands) == 2 and len(operands[0].shape) == 1:
        return True, (False, True)  # a table, looked up element by element
    if torch.Tag.pointwise in func.tags or func in _POINTWISE:
        return True, (True,) * len(operands)
    return False, (False,) * len(operands)


#: Element by element too, though torch does not tag them so.
_POINTWISE = {aten._to_copy.default}


def names_of(*arguments: Any) -> str:
    """The checkpoint tensors that values, and what has a ``value``, draw from, for a message."""
    found = sorted({name for value in _values(arguments) for name in leaves_of(value.pieces)})
    return (", ".join(found[:3]) or "a constant") + (", ..." if len(found) > 3 else "")


def _values(argument: Any) -> Iterator[Value]:
    if isinstance(argument, dict):
        argument = list(argument.values())
    if isinstance(argument, (list, tuple)):
        for inner in argument:
            yield from _values(inner)
        return
    found = argument if isinstance(argument, Value) else getattr(argument, "value", None)
    if isinstance(found, Value):
        yield found
