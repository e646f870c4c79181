"""Memory that symbolic tensors are views of: source addresses, or elements of a constant."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload

from zerostart.geometry import row_major_strides
from zerostart.recipe.refusals import allow_torch_errors, refusal
from zerostart.recipe.values import Value, check_layout, depends_on_values, list_names, make_constant
from zerostart.recipe.views import StridedLayout
from zerostart.upstream.types import Arguments, Keywords

#: The class ``SymbolicTensor``; ``symbolic.py`` defines it and imports this module.
SymbolClass: TypeAlias = type[Any]


class Memory:
    """One storage of eager torch.

    A constant, made by the conversion itself, has elements (``real``) until weights are written into it.
    """

    __slots__ = ("_fill", "_real", "_value", "dtype", "exported", "layout", "overlaps", "version")

    def __init__(self, layout: StridedLayout, dtype: torch.dtype) -> None:
        self.layout = layout
        self.dtype = dtype
        #: Number of writes.
        self.version = 0
        #: True if code outside torch shares the elements and may change them.
        self.exported = False
        #: Name of a checkpoint tensor that shares this memory; writes would not reach it.
        self.overlaps: str | None = None
        self._value: Value | None = None
        self._real: torch.Tensor | None = None
        self._fill: torch.Tensor | None = None

    @classmethod
    def of_value(cls, value: Value, strides: Sequence[int] | None = None, offset: int = 0) -> Memory:
        """Create the memory of a tensor with ``value``.

        ``strides`` (None: row-major) and ``offset`` of the tensor are in elements.
        """
        steps = row_major_strides(value.shape) if strides is None else tuple(strides)
        memory = cls(StridedLayout(value.shape, steps, offset), value.dtype)
        memory._value = value.with_strides(steps)
        return memory

    @classmethod
    def of_constant(cls, real: torch.Tensor) -> Memory:
        """Create the memory of a tensor with elements."""
        memory = cls(StridedLayout(tuple(real.shape), real.stride(), int(real.storage_offset())), real.dtype)
        memory._real = real
        return memory

    @classmethod
    def filled(cls, like: torch.Tensor, fill: torch.Tensor) -> Memory:
        """Create the memory of a constant filled with ``fill``, like ``like`` on meta.

        It takes no memory until the elements are read.
        """
        memory = cls(StridedLayout(tuple(like.shape), like.stride(), 0), like.dtype)
        memory._fill = fill
        return memory

    @property
    def is_constant(self) -> bool:
        """True if no element comes from the checkpoint."""
        return self._real is not None or self._fill is not None

    @property
    def real(self) -> torch.Tensor | None:
        """The tensor with its elements; None for weights."""
        if self._real is None and self._fill is not None:
            layout = self.layout
            self._real = torch.empty_strided(
                layout.shape, layout.strides, dtype=self.dtype, device="cpu"
            ).copy_(self._fill)
            # All views share this tensor from now on.
            self._fill = None
        return self._real

    @property
    def value(self) -> Value:
        """Contents of the memory."""
        if self._real is not None and (self._value is None or self.exported):
            # Copy: torch may write into `real` later, and a value never changes.
            self._value = make_constant(self._real.clone()).with_strides(self.layout.strides)
        elif self._value is None:
            assert self._fill is not None, "a memory holds something"
            filled = make_constant(self._fill.expand(self.layout.shape))
            self._value = filled.with_strides(self.layout.strides)
        return self._value

    def hold(self, value: Value) -> None:
        """Replace the contents."""
        self._value, self._real, self._fill = value.with_strides(self.layout.strides), None, None
        self.version += 1

    def touch(self) -> None:
        """Record that an operator changed a constant."""
        self._value = None
        self.version += 1

    def copy(self) -> Memory:
        """Copy the memory and its contents."""
        memory = Memory(self.layout, self.dtype)
        memory._value = self.value
        memory._real = None if self._real is None else self._real.clone()
        memory._fill = self._fill
        memory.version, memory.overlaps = self.version, self.overlaps
        return memory


# Operands of one operator on symbolic tensors.

aten = torch.ops.aten
#: Views of an operand that their schemas do not declare.
UNSAID_VIEWS = {
    aten._unsafe_view.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
}
_DEPENDS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEXED = {
    *(aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default, aten.index_put_.default),
    *(aten._index_put_impl_.default, aten._unsafe_index_put.default),
}


@functools.cache
def is_write(func: OpOverload) -> bool:
    """Return True if an operator writes into operands."""
    return bool(func._schema.is_mutable)


@functools.cache
def is_view(func: OpOverload) -> bool:
    """Return True if an operator's result shares its operand's memory."""
    returns = func._schema.returns
    return func in UNSAID_VIEWS or (bool(returns) and returns[0].alias_info is not None)


def iter_tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments, also those in lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)) or type(value) is type({}.values()):
            yield from iter_tensors(value)


def map_tensors(value: object, change: Callable[[torch.Tensor], object]) -> Any:
    """Apply ``change`` to tensors, those in lists and dictionaries included."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(inner, change) for inner in value)
    if isinstance(value, dict):
        return {key: map_tensors(inner, change) for key, inner in value.items()}
    return value


def make_symbolic(cls: SymbolClass, real: torch.Tensor) -> Any:
    """Make a symbolic constant; tensors without elements are returned unchanged."""
    if real.device.type == "meta" or real.layout != torch.strided:
        return real
    # Resolve lazy conjugates and negatives: a memory has elements, but no bits for them.
    real = real.detach().cpu()
    memory = Memory.of_constant(real.resolve_conj().resolve_neg())
    # torch borrows the memory of an array or buffer, and cannot resize it.
    memory.exported = not real.untyped_storage().resizable()
    return cls(memory)


def get_fill_value(func: OpOverload, args: Sequence[object]) -> Any:
    """Return the value that a factory fills in; otherwise None."""
    name = func._schema.name.removeprefix("aten::").removeprefix("new_").removesuffix("_like")
    if name == "full":
        return args[2] if func._schema.name == "aten::new_full" else args[1]
    return {"empty": 0, "empty_strided": 0, "new_empty_strided": 0, "zeros": 0, "ones": 1}.get(name)


def take_elements(cls: SymbolClass, values: object) -> Any:
    """Replace constants among arguments by their elements."""
    return map_tensors(values, lambda t: t.elements if isinstance(t, cls) else t)


def are_constant(cls: SymbolClass, tensors: Sequence[object]) -> bool:
    """Return True if all elements of all tensors are known."""
    return all(not isinstance(t, cls) or t.memory.is_constant for t in tensors)


def run_on_meta(cls: SymbolClass, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """Run torch's meta kernel, for shapes, strides, dtypes and errors.

    Raises ConversionError if torch needs values for that.
    """

    def twin(t: Any) -> torch.Tensor:
        if isinstance(t, cls):
            meta: torch.Tensor = t.meta
            return meta
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")

    # Quantised tensors have scales, which no meta kernel has.
    if torch.Tag.data_dependent_output in func.tags or func._schema.name.startswith("aten::quantize"):
        raise depends_on_values(func, args, list(kwargs.values()))
    twins, named = map_tensors(args, twin), map_tensors(kwargs, twin)
    # "cpu" or "the device of the weight" means the twin's device here.
    if named.get("device") is not None:
        named["device"] = torch.device("meta")
    with allow_torch_errors():
        try:
            result = func(*twins, **named)
        except RuntimeError as error:
            if _DEPENDS & set(func.tags):
                raise depends_on_values(func, args) from error
            # Eager torch has no such error, so the converter must not catch it.
            if isinstance(error, NotImplementedError):
                raise refusal(
                    f"the conversion of {list_names(args)} calls {func}, and torch cannot determine the "
                    f"result's shape without values: {error}"
                ) from error
            raise
    check_layout(func, [*iter_tensors((twins, named.values()))], args)
    return result


def take_values(cls: SymbolClass, values: object) -> Any:
    """Replace tensors among arguments by their values."""

    def own(t: torch.Tensor) -> Value:
        if isinstance(t, cls):
            value: Value = t.value
            return value
        if t.device.type == "meta":
            raise refusal(
                "a conversion takes a tensor that is on the meta device, and has no elements; make it with "
                'device="cpu"'
            )
        # Copy: code outside the conversion may change the tensor later.
        return make_constant(t.detach().clone()).with_strides(t.stride())

    return map_tensors(values, own)


def number_masks(cls: SymbolClass, func: OpOverload, args: Arguments) -> tuple[object, ...]:
    """Replace constant masks among indices by row numbers."""
    if func not in _INDEXED:
        return args
    indices: list[object] = []
    for index in args[1]:
        masks = isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
        if masks and are_constant(cls, [index]):
            real = take_elements(cls, index)
            indices += [make_symbolic(cls, rows) for rows in real.nonzero(as_tuple=True)]
        else:
            indices.append(index)
    return (args[0], indices, *args[2:])
