"""Symbolic tensors: a shape, a dtype, and the pieces that say where each element comes from.

A converter that runs on them runs its own code, the ordinary torch calls included; what the calls do to
indices is recorded, and no data exists. The recording happens below torch's Python API, at the operator
dispatcher, so that a method, a function, an einops pattern and a registered transformers operation all
arrive as the same few operators. Operators that move elements change the pieces; all others make a computed
tensor (``computed``), whose elements the pieces then refer to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves, tree_map

from zerostart import geometry
from zerostart.errors import ConversionError
from zerostart.recipe.bits import computed
from zerostart.recipe.computed import Computed, Operand, leaves_of
from zerostart.recipe.dtypes import holds

__all__ = ["HANDLERS", "Handler", "Mutation", "SymbolicTensor", "compute", "functionalized", "lifted"]

aten = torch.ops.aten
Handler = Callable[..., Any]
T = TypeVar("T")
#: By operator: what it does to pieces (``operators`` fills it).
HANDLERS: dict[Any, Handler] = {}


class Mutation(Exception):
    """A converter writes into a tensor: it has to be run ``functionalized``."""


def functionalized(function: Callable[..., T]) -> Callable[..., T]:
    """``function`` with its writes into tensors turned into new tensors, by torch's own functionalization.

    Tensors in its arguments and in its result may lie in lists, tuples and dictionaries.
    """
    made: Callable[..., T] = torch.func.functionalize(function)
    return made


class SymbolicTensor(torch.Tensor):
    """A tensor without data whose elements are known by their source addresses.

    ``pieces`` tile the tensor. ``stored`` are the dtypes that the elements are kept in, before the cast to
    the tensor's own. The class is a ``torch.Tensor``, since converters ask with ``isinstance``.
    """

    pieces: tuple[geometry.Piece, ...]
    stored: frozenset[torch.dtype]

    # Everything is recorded at dispatch; the detour before it would cost more than the recording.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own idiom

    @staticmethod
    def __new__(
        cls,
        pieces: Sequence[geometry.Piece],
        shape: Sequence[int],
        dtype: torch.dtype,
        stored: frozenset[torch.dtype] | None = None,
        strides: Sequence[int] | None = None,
    ) -> SymbolicTensor:
        """Make a tensor of ``shape`` and ``dtype`` out of ``pieces``, with eager torch's ``strides``."""
        # On the CPU by its own account: what a converter makes "on the device of the weight" has values.
        self: SymbolicTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            tuple(shape),
            strides=None if strides is None else tuple(strides),
            dtype=dtype,
            device=torch.device("cpu"),
            requires_grad=False,
        )
        self.pieces = tuple(pieces)
        self.stored = stored or frozenset((dtype,))
        return self

    @classmethod
    def of(
        cls, name: str, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None
    ) -> SymbolicTensor:
        """The checkpoint tensor ``name`` as it is stored (``strides`` in elements, None for row-major)."""
        return cls(geometry.whole(name, shape, strides), shape, dtype, strides=strides)

    @classmethod
    def computed(cls, source: Computed) -> SymbolicTensor:
        """The tensor that ``source`` computes."""
        return cls(geometry.whole(source, source.shape), source.shape, source.dtype)

    def copied(self) -> SymbolicTensor:
        """A tensor of its own with the same elements, for a converter that may write into it."""
        return SymbolicTensor(self.pieces, tuple(self.shape), self.dtype, self.stored)

    def rounds(self, dtype: torch.dtype) -> bool:
        """Whether the tensor's own dtype loses what the stored elements, cast to ``dtype``, might keep."""
        return dtype != self.dtype and any(not holds(self.dtype, stored) for stored in self.stored)

    def __repr__(self) -> str:  # type: ignore[override]  # no contents to show
        return f"SymbolicTensor(shape={tuple(self.shape)}, dtype={self.dtype}, pieces={len(self.pieces)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has no classmethod here
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[Any, Any] | None = None,
    ) -> Any:
        """Record what ``func`` does to indices, or that it computes."""
        handler = HANDLERS.get(func)
        if handler is None:
            return compute(func, args, kwargs or {})
        if _has_values(args):
            args = tree_map(lifted, args)
        return handler(*args, **(kwargs or {}))


def _has_values(args: Iterable[Any]) -> bool:
    """Whether a tensor that is not symbolic is among the arguments, or in a list of them."""
    return any(
        _has_values(value)
        if isinstance(value, (list, tuple))
        else isinstance(value, torch.Tensor) and not isinstance(value, SymbolicTensor)
        for value in args
    )


def lifted(value: Any) -> Any:
    """A tensor with values, which a conversion made itself, as a symbolic one; anything else as it is."""
    if not isinstance(value, torch.Tensor) or isinstance(value, SymbolicTensor):
        return value
    shape = tuple(value.shape)
    return SymbolicTensor.computed(Computed(None, shape, value.dtype, value=value.detach()))


def compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operator that does more than move elements, as computed tensors.

    Raises Mutation for one that writes into a tensor, ConversionError for one whose result is random or
    depends on values in a way that a shape cannot say.
    """
    if torch.Tag.nondeterministic_seeded in func.tags:
        raise ConversionError(f"the conversion of {_named(args, kwargs)} calls {func}, which is random")
    if func._schema.is_mutable:
        raise Mutation(f"{func} writes into a tensor")
    made = _shapes(func, args, kwargs)
    args, kwargs = tree_map(_operand, (args, kwargs))

    def result(meta: torch.Tensor, output: int | None) -> SymbolicTensor:
        pieces = computed(func, args, kwargs, meta, output)
        return SymbolicTensor(pieces, tuple(meta.shape), meta.dtype, strides=meta.stride())

    if isinstance(made, torch.Tensor):
        return result(made, None)
    return type(made)(result(meta, number) for number, meta in enumerate(made))


def _operand(value: Any) -> Any:
    """A tensor as an operand, with the strides that it has in eager torch; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    strides = None if value.is_contiguous() else value.stride()
    return Operand(lifted(value).pieces, tuple(value.shape), value.dtype, strides)


def _shapes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``func`` gives on the meta device: shapes and dtypes."""

    def empty(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    depends = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
    try:
        made = func(*tree_map(empty, args), **tree_map(empty, kwargs))
    except (NotImplementedError, RuntimeError):
        if not depends:
            raise
        made = None
    if isinstance(made, torch.Tensor) or (
        isinstance(made, (list, tuple)) and made and all(isinstance(m, torch.Tensor) for m in made)
    ):
        return made
    raise ConversionError(
        f"the conversion of {_named(args, kwargs)} calls {func}, whose result depends on the values of the "
        "weights; a conversion has to do the same whatever they are"
    )


def _named(*values: Any) -> str:
    """The checkpoint tensors that ``values`` draw from, for a message."""
    found = sorted(
        {n for t in tree_leaves(values) if isinstance(t, SymbolicTensor) for n in leaves_of(t.pieces)}
    )
    return ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
