"""What a converter may not ask a tensor for while it is traced: its elements, and where they lie.

There is no memory behind a symbolic tensor. What asks for it by way of torch's dispatcher is refused there;
these are the ways that go past it. torch itself raises for those that call its C functions unbound.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from zerostart.recipe.refusals import refusal
from zerostart.recipe.values import names_of

_MEMORY = (
    *(
        "data_ptr",
        "untyped_storage",
        "storage",
        "_typed_storage",
        "storage_type",
        "share_memory_",
        "is_shared",
    ),
    *("__dlpack__", "__reduce_ex__", "__reduce__", "apply_", "map_", "map2_", "pin_memory", "to_mkldnn"),
)


def _refuses(name: str) -> Callable[..., object]:
    def refuse(self: object, *_: object, **__: object) -> Any:
        raise refusal(
            f"the conversion of {names_of(self)} asks for the memory of a tensor ({name}), but a "
            "conversion is traced with tensors that have no data; leave this out of the "
            "conversion"
        )

    refuse.__name__ = name
    return refuse


#: By torch's own method: the name of the one that takes its place, for calls of the unbound method.
SEALED: dict[object, str] = {
    getattr(torch.Tensor, name): name for name in (*_MEMORY, "tolist", "numpy", "__array__", "__deepcopy__")
}


class Sealed:
    """The methods of a tensor that reach its elements past torch's dispatcher."""

    for _name in _MEMORY:
        # At the class's making, for the names are many and what each does is the same.
        locals()[_name] = _refuses(_name)

    memory: Any

    def _elements(self, asks: str) -> torch.Tensor:
        """The elements of a constant. Raises ConversionError for those of the checkpoint."""
        if not self.memory.is_constant:
            raise refusal(
                f"the conversion of {names_of(self)} asks for the values of weights ({asks}); a "
                "conversion must do the same whatever the values are, with torch's own operators"
            )
        tensor: Any = self
        elements: torch.Tensor = tensor.elements
        return elements

    def tolist(self) -> Any:
        """The elements of a constant as Python numbers. Raises ConversionError for any other tensor."""
        return self._elements("tolist").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The elements of a constant as an array that shares its memory.

        Raises ConversionError for any other tensor.
        """
        made = self._elements("numpy").numpy(force=force)
        # NumPy can write into it from now on, without a word to torch.
        self.memory.exported = True
        return made

    def __array__(self, *args: object, **kwargs: object) -> Any:
        """The elements of a constant, for NumPy."""
        elements: Any = self._elements("numpy")
        made = elements.__array__(*args, **kwargs)
        self.memory.exported = True
        return made

    def __format__(self, spec: str) -> str:
        """As torch has it: the element of a tensor without dimensions, a description of any other."""
        tensor: Any = self
        return format(tensor.item(), spec) if tensor.dim() == 0 else repr(self)

    def __copy__(self) -> Any:
        """A tensor that shares the memory."""
        tensor: Any = self
        return tensor.detach()

    def __deepcopy__(self, memo: dict[int, object]) -> Any:
        """A tensor of its own; what shares memory with it shares that of its copy."""
        if id(self) not in memo:
            tensor: Any = self
            # By memory, not by tensor: two views of one memory are views of one memory in the copy, too.
            twin = memo.get(id(tensor.memory))
            if twin is None:
                twin = memo[id(tensor.memory)] = tensor.memory.copy()
            memo[id(self)] = made = type(tensor)(twin, tensor.steps, tensor.meta if tensor.steps else None)
            made._known = tensor._known
            made.__dict__.update(
                copy.deepcopy({k: v for k, v in tensor.__dict__.items() if k not in made.__dict__})
            )
        return memo[id(self)]

    @property
    def data(self) -> Any:
        """The same tensor without autograd. Set, it raises ConversionError for one from outside."""
        tensor: Any = self
        return tensor.detach()

    @data.setter
    def data(self, other: object) -> None:
        tensor: Any = self
        if not isinstance(other, type(tensor)):
            raise refusal(
                f"the conversion of {names_of(self)} makes a tensor use memory from outside the conversion"
            )
        tensor.become(other)
