"""Contents of symbolic tensors: pieces of checkpoint and computed tensors, in a shape.

A value never changes; a write gives the tensor another value. Operators that move elements change the pieces
(``operators``). All others make a computed tensor that the new pieces refer to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from zerostart import geometry
from zerostart.checkpoint.catalog import contiguous_strides
from zerostart.errors import ConversionError
from zerostart.geometry import Box, Piece, reshape
from zerostart.recipe.dtypes import can_hold
from zerostart.recipe.refusals import refusal
from zerostart.upstream.types import Arguments, Keywords


@dataclass(frozen=True, slots=True)
class Value:
    """Elements by their source addresses, in a shape."""

    #: They tile ``shape``.
    pieces: tuple[Piece, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    #: Stored dtypes of the elements, before the cast to ``dtype``; by default ``dtype``.
    stored: frozenset[torch.dtype] = frozenset()
    #: Strides of the tensor in eager torch, in elements; None for row-major. torch's kernels depend on them.
    strides: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.stored:
            object.__setattr__(self, "stored", frozenset((self.dtype,)))

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def computed(self) -> set[Computed]:
        """Computations that give some of the elements."""
        return {s for piece in self.pieces for s in piece.source if isinstance(s, Computed)}

    def split(self, factors: Sequence[Sequence[int]]) -> Value:
        """Split the dimensions like those of a broadcast result; row-major."""
        shape: list[int] = []
        for size, parts in zip(self.shape, factors[len(factors) - len(self.shape) :], strict=True):
            shape += parts if size != 1 else [1] * len(parts)
        return Value(reshape(self.pieces, self.shape, shape), tuple(shape), self.dtype)

    def with_strides(self, strides: Sequence[int]) -> Value:
        """Return the value with other strides."""
        new_strides = None if contiguous_strides(self.shape, tuple(strides)) else tuple(strides)
        return self if new_strides == self.strides else replace(self, strides=new_strides)

    def to_meta(self) -> torch.Tensor:
        """Return a meta tensor with the shape, dtype and strides."""
        strides = self.strides or geometry.row_major_strides(self.shape)
        return torch.empty_strided(self.shape, strides, dtype=self.dtype, device="meta")

    def rounds(self, dtype: torch.dtype) -> bool:
        """Return True if casting to ``dtype`` directly would keep more digits."""
        return dtype != self.dtype and any(not can_hold(self.dtype, stored) for stored in self.stored)

    @classmethod
    def of(cls, source: Computed) -> Value:
        """Return the result of ``source``."""
        return cls(geometry.whole(source, source.shape), source.shape, source.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """The result of an operator, used like a checkpoint tensor.

    Computations are compared by identity.
    """

    #: An ATen operator; None for a constant, whose elements are ``value``.
    function: Callable[..., Any] | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    operands: tuple[Value, ...] = ()
    #: Positions of the operands among the leaves of ``spec``.
    at: tuple[int, ...] = ()
    #: True for each operand of which a part of the result needs only the same part.
    aligned: tuple[bool, ...] = ()
    #: All other arguments, in the tree ``spec``.
    others: Arguments = ()
    spec: TreeSpec | None = None
    #: Number of the result; None if there is only one.
    output: int | None = None
    #: True if each box of the result can be computed separately, bit for bit. Other results are computed
    #: whole, from operands in the strides of eager torch.
    exact: bool = True
    value: torch.Tensor | None = field(default=None, repr=False)
    #: True if this or an operand's computation needs whole tensors.
    whole: bool = field(init=False)
    #: Memory for computing one element, operands included, in bytes.
    element_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        whole, nbytes = not self.exact, self.dtype.itemsize
        for operand, aligned in zip(self.operands, self.aligned, strict=True):
            sources = operand.computed
            whole |= any(source.whole for source in sources)
            if aligned and operand.numel() > 1:
                nbytes += operand.dtype.itemsize + max((s.element_bytes for s in sources), default=0)
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
        """Compute a box of the result from the operands' regions.

        ``box`` is in the shape split by ``factors``.
        """
        if self.function is None:
            assert self.value is not None, "a constant has a value"
            split = [size for parts in factors for size in parts]
            elements = self.value.reshape(split)
            for dim, (origin, extent) in enumerate(zip(box.origin, box.extent, strict=True)):
                elements = elements.narrow(dim, origin, extent)
            return elements
        filled = list(self.others)
        for place, operand in zip(self.at, operands, strict=True):
            filled[place] = operand
        assert self.spec is not None, "an operator has arguments"
        args, kwargs = tree_unflatten(filled, self.spec)
        with torch.no_grad():
            results = self.function(*args, **kwargs)
        result: torch.Tensor = results if self.output is None else results[self.output]
        return result


def find_leaves(pieces: Sequence[Piece]) -> set[str]:
    """Return the checkpoint tensors that ``pieces`` depend on."""
    return {str(source) for source in find_sources(pieces)}


def find_sources(pieces: Sequence[Piece]) -> set[object]:
    """Return the sources that ``pieces`` depend on, also by computations."""
    sources: set[object] = set()
    visited: set[int] = set()
    todo: list[object] = [source for piece in pieces for source in piece.source]
    while todo:
        source = todo.pop()
        if not isinstance(source, Computed):
            sources.add(source)
        elif id(source) not in visited:
            visited.add(id(source))
            todo += [s for operand in source.operands for piece in operand.pieces for s in piece.source]
    return sources


aten = torch.ops.aten
#: Operators whose CPU kernels lay out results differently from their meta kernels: for all tensors, or for
#: tensors that are not contiguous.
_UNKNOWN_LAYOUT = {
    *(aten._fft_r2c, aten._fft_c2r, aten._fft_c2c, aten._linalg_svd, aten.svd, aten.linalg_eig),
    *(aten.channel_shuffle, aten.native_channel_shuffle, aten.resize_as),
}
_ROWS_ONLY = {
    *(aten.pow.Scalar, aten.isin, aten.log_sigmoid_forward, aten.pixel_shuffle, aten.pixel_unshuffle),
    *(aten.mse_loss_backward, aten.huber_loss_backward, aten.smooth_l1_loss_backward),
    aten.native_dropout_backward,
}
#: Effect of each operator on values, filled by ``operators`` and ``views``.
HANDLERS: dict[object, Callable[..., Value]] = {}


def make_constant(tensor: torch.Tensor) -> Value:
    """Return the value of a tensor that no longer changes."""
    tensor = tensor.detach()
    return Value.of(Computed(None, tuple(tensor.shape), tensor.dtype, value=tensor))


def compute(func: OpOverload, args: Arguments, kwargs: Keywords, metas: Any = None) -> Any:
    """Return the result of an operator that computes.

    Arguments have values in place of tensors. ``metas`` is the result on meta, if known. Raises
    ConversionError for a random operator, and for one whose shape depends on elements.
    """
    if torch.Tag.nondeterministic_seeded in func.tags:
        raise refusal(f"the conversion of {list_names(args, kwargs)} calls {func}, which is random")
    if metas is None:
        twins, named = tree_map(lambda v: v.to_meta() if isinstance(v, Value) else v, (args, kwargs))
        check_layout(func, [t for t in tree_leaves((twins, named)) if isinstance(t, torch.Tensor)], args)
        metas = func(*twins, **named)
    # Operands keep their strides, since bits of the result may depend on them.
    flat, spec = tree_flatten((tuple(args), dict(kwargs)))
    at = tuple(i for i, value in enumerate(flat) if isinstance(value, Value))
    operands = tuple(flat[i] for i in at)
    others = tuple(None if i in at else value for i, value in enumerate(flat))

    def result(meta: torch.Tensor, output: int | None) -> Value:
        aligned = _aligned_operands(func, args, kwargs, operands, meta)
        whole = (False,) * len(operands)
        exact, shape = aligned is not None, tuple(meta.shape)
        return Value.of(
            Computed(func, shape, meta.dtype, operands, at, aligned or whole, others, spec, output, exact)
        )

    if isinstance(metas, torch.Tensor):
        return result(metas, None)
    return type(metas)(result(meta, number) for number, meta in enumerate(metas))


def compute_one(func: OpOverload, *args: object, **kwargs: object) -> Value:
    """Return the only result of an operator that computes."""
    result: Value = compute(func, args, kwargs)
    return result


def check_layout(func: OpOverload, twins: Sequence[torch.Tensor], *arguments: object) -> None:
    """Refuse an operator whose strides the meta kernel may get wrong."""
    names = {func, func._overloadpacket}
    if names & _UNKNOWN_LAYOUT or (names & _ROWS_ONLY and not all(t.is_contiguous() for t in twins)):
        raise refusal(
            f"the conversion of {list_names(*arguments)} calls {func}, whose memory layout is unknown; make "
            "the tensors contiguous before, or use other operators"
        )


def depends_on_values(func: OpOverload, *arguments: object) -> ConversionError:
    """Return the error for an operator that depends on weights' values."""
    return refusal(
        f"the conversion of {list_names(*arguments)} calls {func}, whose result depends on the values of the "
        "weights; a conversion has to do the same whatever they are"
    )


def list_names(*arguments: object) -> str:
    """List the checkpoint tensors of arguments, for a message."""
    values = [v if isinstance(v, Value) else getattr(v, "value", None) for v in tree_leaves(arguments)]
    names = sorted({name for v in values if isinstance(v, Value) for name in find_leaves(v.pieces)})
    return (", ".join(names[:3]) or "a constant") + (", ..." if len(names) > 3 else "")


#: Also element by element, though torch does not tag them so.
_POINTWISE = {
    *(aten._to_copy.default, aten._conj_physical.default, aten.masked_fill.Tensor, aten.hardswish.default),
    *(aten.floor_divide.default, aten.floor_divide.Scalar),
}
#: Operators that move, select or compare elements, or combine truth values, of any dtype.
_MOVES = {
    *(aten._to_copy, aten.clone, aten._conj_physical, aten.where, aten.masked_fill, aten.positive),
    *(aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge),
    *(aten.isnan, aten.isinf, aten.isfinite, aten.isposinf, aten.isneginf, aten.signbit),
    *(aten.logical_and, aten.logical_or, aten.logical_xor, aten.logical_not),
}
#: Rounded once, by IEEE 754; sums only if nothing is multiplied before.
_ROUNDED = {aten.abs, aten.neg, aten.mul, aten.reciprocal, aten.div.Tensor, aten.div.Scalar, aten.true_divide}
_SUMS = {aten.add, aten.sub, aten.rsub}


def _aligned_operands(
    func: OpOverload,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    operands: Sequence[Value],
    meta: torch.Tensor,
) -> tuple[bool, ...] | None:
    """Return which operands are needed only in the result's box.

    None if the result is computed whole. torch's loops compute full vectors and the rest by different
    routines. These agree bit for bit only where IEEE 754 defines the rounding.
    """
    if func is aten.view.dtype and meta.dtype.itemsize == operands[0].dtype.itemsize:
        return (True,)
    if func is aten.index.Tensor and len(operands) == 2 and len(operands[0].shape) == 1:
        return (False, True)  # a table, looked up element by element
    pointwise = torch.Tag.pointwise in func.tags or func in _POINTWISE
    return (True,) * len(operands) if pointwise and _is_exact(func, args, kwargs, operands, meta) else None


def _is_exact(
    func: OpOverload,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    operands: Sequence[Value],
    meta: torch.Tensor,
) -> bool:
    names = {func, func._overloadpacket}
    if names & _MOVES:
        return True
    dtypes = {meta.dtype, *(operand.dtype for operand in operands)}
    scalars = [value for value in tree_leaves((args, kwargs)) if isinstance(value, (float, complex))]
    if not scalars and not any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes):
        return True
    if any(dtype.is_complex for dtype in dtypes) or any(isinstance(value, complex) for value in scalars):
        return False
    if aten.ldexp in names:
        return not operands[-1].dtype.is_floating_point
    if names & _SUMS:
        return len(args) <= 2 and kwargs.get("alpha", 1) in (1, -1)
    return bool(names & _ROUNDED)
