"""The operands of one operator on symbolic tensors: what they are, and what they become for it.

Tensors with elements may be among them: constants, which a converter made itself and which are symbolic too,
and tensors from outside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from zerostart.recipe.memory import Memory, Symbol
from zerostart.recipe.refusals import by_torch, refusal
from zerostart.recipe.values import Value, check_layout, constant, depends_on_values, names_of
from zerostart.upstream.torch.wrapper import resizable
from zerostart.upstream.types import Arguments, Keywords

aten = torch.ops.aten
#: Views of an operand, though their schemas do not say so.
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
def writes(func: OpOverload) -> bool:
    """Whether an operator writes into operands."""
    return bool(func._schema.is_mutable)


@functools.cache
def is_view(func: OpOverload) -> bool:
    """Whether what an operator gives shows the memory of its operand."""
    returns = func._schema.returns
    return func in UNSAID_VIEWS or (bool(returns) and returns[0].alias_info is not None)


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among arguments, those in lists too."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)) or type(value) is type({}.values()):
            yield from tensors_in(value)


def mapped(value: object, change: Callable[[torch.Tensor], object]) -> Any:
    """``value`` with its tensors changed, those in lists and dictionaries too."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(inner, change) for inner in value)
    if isinstance(value, dict):
        return {key: mapped(inner, change) for key, inner in value.items()}
    return value


def constant_of(cls: type[Symbol], real: torch.Tensor) -> Any:
    """A tensor that torch made as a constant; one without elements as it is."""
    if real.device.type == "meta" or real.layout != torch.strided:
        return real
    # Bits of a lazy conjugate or negative are settled, since a memory has elements and no bits.
    real = real.detach().cpu()
    memory = Memory.of_constant(real.resolve_conj().resolve_neg())
    memory.exported = not resizable(real)
    return cls(memory)


def fill_of(func: OpOverload, args: Sequence[object]) -> Any:
    """The one element that a factory fills a tensor with; None for any other operator."""
    name = func._schema.name.removeprefix("aten::").removeprefix("new_").removesuffix("_like")
    if name == "full":
        return args[2] if func._schema.name == "aten::new_full" else args[1]
    return {"empty": 0, "empty_strided": 0, "new_empty_strided": 0, "zeros": 0, "ones": 1}.get(name)


def reals(cls: type[Symbol], values: object) -> Any:
    """Arguments with the elements of constants."""
    return mapped(values, lambda t: t.elements if isinstance(t, cls) else t)


def all_constant(cls: type[Symbol], tensors: Sequence[object]) -> bool:
    """Whether the elements of all tensors are known."""
    return all(not isinstance(t, cls) or t.memory.is_constant for t in tensors)


def on_meta(cls: type[Symbol], func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """What torch's meta kernel gives: shapes, strides, dtypes, and the errors of wrong ones.

    Raises ConversionError where torch cannot tell that without values.
    """

    def twin(t: Any) -> torch.Tensor:
        if isinstance(t, cls):
            found: torch.Tensor = t.meta
            return found
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")

    # Quantised tensors have scales, which no meta kernel carries.
    if torch.Tag.data_dependent_output in func.tags or func._schema.name.startswith("aten::quantize"):
        raise depends_on_values(func, args, list(kwargs.values()))
    twins, named = mapped(args, twin), mapped(kwargs, twin)
    # A converter that asks for the CPU, or for "the device of the weight", means the twin's device here.
    if named.get("device") is not None:
        named["device"] = torch.device("meta")
    with by_torch():
        try:
            made = func(*twins, **named)
        except RuntimeError as error:
            if _DEPENDS & set(func.tags):
                raise depends_on_values(func, args) from error
            # Not the converter's fault, and it must not catch it: eagerly there is no such error.
            if isinstance(error, NotImplementedError):
                raise refusal(
                    f"the conversion of {names_of(args)} calls {func}, and torch cannot determine the "
                    f"result's shape without values: {error}"
                ) from error
            raise
    check_layout(func, [*tensors_in((twins, named.values()))], args)
    return made


def valued(cls: type[Symbol], values: object) -> Any:
    """Arguments with the values of tensors, for the handlers of operators."""

    def own(t: torch.Tensor) -> Value:
        if isinstance(t, cls):
            found: Value = t.value
            return found
        if t.device.type == "meta":
            raise refusal(
                "a conversion takes a tensor that is on the meta device, and has no elements; make it with "
                'device="cpu"'
            )
        # A copy: from outside, and so anybody's to change later.
        return constant(t.detach().clone()).lying(t.stride())

    return mapped(values, own)


def counted(cls: type[Symbol], func: OpOverload, args: Arguments) -> tuple[object, ...]:
    """Arguments of an indexing operator with the masks among constant indices as the numbers of rows."""
    if func not in _INDEXED:
        return args
    indices: list[object] = []
    for index in args[1]:
        masks = isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
        if masks and all_constant(cls, [index]):
            real = reals(cls, index)
            indices += [constant_of(cls, rows) for rows in real.nonzero(as_tuple=True)]
        else:
            indices.append(index)
    return (args[0], indices, *args[2:])
