"""Symbolic tensors: tensors without data, known by the source addresses of their elements.

A converter runs its own code on them. The effect of each call on indices is recorded below torch's Python
API, at the operator dispatcher. So methods, functions, einops patterns and transformers' operations all
arrive as the same few operators.

A symbolic tensor is a view of a memory, as in eager torch. Views are steps from the contents of the memory. A
write goes back through the steps, and all other views show it. Shapes, strides and errors are those of
torch's meta kernels.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch._ops import OpOverload

from zerostart import geometry
from zerostart.recipe.memory import Memory
from zerostart.recipe.record import record
from zerostart.recipe.refusals import refusal, refuse_own_errors
from zerostart.recipe.values import Value, list_names, make_constant
from zerostart.recipe.views import StridedLayout, ViewOperation
from zerostart.upstream.torch.tensors import become_wrapper, make_wrapper, without_dispatch
from zerostart.upstream.types import Arguments, Keywords

# Methods that ask for the elements of a tensor, or for their address.

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


def _make_refusal(name: str) -> Callable[..., object]:
    def refuse(self: object, *_: object, **__: object) -> Any:
        raise refusal(
            f"the conversion of {list_names(self)} asks for the memory of a tensor ({name}), but a "
            "conversion is traced with tensors that have no data; leave this out of the "
            "conversion"
        )

    refuse.__name__ = name
    return refuse


_CONSTANTS: ContextVar[list[weakref.ref[SymbolicTensor]] | None] = ContextVar("constants", default=None)


@contextlib.contextmanager
def materialise_constants() -> Iterator[None]:
    """Turn constants that outlive the context into ordinary tensors.

    They may be in a cache or a module, for code that runs long after the conversion. Raises ConversionError
    for a constant that cannot be replaced.
    """
    constants: list[weakref.ref[SymbolicTensor]] = []
    token = _CONSTANTS.set(constants)
    try:
        yield
    finally:
        _CONSTANTS.reset(token)
        while constants:
            tensor = constants.pop()()
            if tensor is not None and tensor.memory.is_constant:
                _make_real(tensor)


def _make_real(tensor: SymbolicTensor) -> None:
    """Turn the object into an ordinary tensor, with its attributes."""
    real = tensor.elements
    assert real is not None, "a constant has elements"
    # Copy attributes of scripts, but not those of the symbolic tensor.
    attributes = {k: v for k, v in tensor.__dict__.items() if k not in SymbolicTensor.__annotations__}
    if attributes.pop("_is_param", False):
        real = torch.nn.Parameter(real, tensor.requires_grad)
    real.__dict__.update(attributes)
    if tensor.is_leaf:
        real.requires_grad_(tensor.requires_grad)
    swap: Any = torch.utils.swap_tensors
    try:
        swap(tensor, real)
    except RuntimeError as error:
        raise refusal(
            "a conversion keeps a tensor in a place that cannot be traced (a graph of autograd, "
            f"or behind a weak reference); create the tensor where it is used ({error})"
        ) from error


class SymbolicTensor(torch.Tensor):
    """A tensor without data, with source addresses as elements.

    ``steps`` are the views from the contents of ``memory`` to this tensor. The class derives from
    ``torch.Tensor``, since converters ask ``isinstance``.
    """

    memory: Memory
    steps: tuple[ViewOperation, ...]
    _meta: torch.Tensor | None
    _cached: tuple[int, Value] | None

    # Everything is recorded at dispatch; a detour before it would cost more than the recording.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own idiom

    @staticmethod
    def __new__(
        cls, memory: Memory, steps: tuple[ViewOperation, ...] = (), meta: torch.Tensor | None = None
    ) -> SymbolicTensor:
        """Create the view ``steps`` of ``memory``, with its meta twin."""
        # The device is the CPU, so that tensors made "on the device of the weight" have elements.
        if meta is None:
            layout = memory.layout
            self = make_wrapper(cls, layout.shape, layout.strides, layout.offset, memory.dtype)
        else:
            bits = meta if meta.is_conj() or meta.is_neg() else None
            self = make_wrapper(cls, meta.shape, meta.stride(), int(meta.storage_offset()), meta.dtype, bits)
        self.memory = memory
        self.steps = steps
        self._meta = meta
        self._cached = None
        constants = _CONSTANTS.get()
        if constants is not None and memory.is_constant:
            constants.append(weakref.ref(self))
        return self

    @classmethod
    def of(
        cls, name: str, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None
    ) -> SymbolicTensor:
        """Create a checkpoint tensor; ``strides`` in elements, None for row-major."""
        return cls(Memory.of_value(Value(geometry.whole(name, shape, strides), tuple(shape), dtype), strides))

    @classmethod
    def filled(
        cls, pieces: Sequence[geometry.Piece], shape: Sequence[int], dtype: torch.dtype
    ) -> SymbolicTensor:
        """Create a row-major tensor from ``pieces`` that tile its shape."""
        return cls(Memory.of_value(Value(tuple(pieces), tuple(shape), dtype)))

    @property
    def layout_in_memory(self) -> StridedLayout:
        """Shape, strides and offset."""
        return StridedLayout(tuple(self.shape), self.stride(), int(self.storage_offset()))

    @property
    def value(self) -> Value:
        """Present contents."""
        memory = self.memory
        # The version counts recorded writes; memory shared with NumPy may change without one.
        if self._cached is None or self._cached[0] != memory.version or memory.exported:
            self._cached = (memory.version, self._compute_value())
        return self._cached[1]

    @refuse_own_errors
    def _compute_value(self) -> Value:
        with without_dispatch():
            value = self.memory.value
            for step in self.steps:
                value = step.of(value).with_strides(step.layout.strides)
            return value

    @property
    def pieces(self) -> tuple[geometry.Piece, ...]:
        """Present sources of the elements."""
        return self.value.pieces

    @property
    def meta(self) -> torch.Tensor:
        """A meta tensor with the same shape, strides and bits."""
        if self._meta is None:
            layout = self.memory.layout
            with without_dispatch():
                room = 1 + sum((n - 1) * s for n, s in zip(layout.shape, layout.strides, strict=True))
                twin = torch.empty(layout.offset + room, dtype=self.dtype, device="meta")
                self._meta = twin.as_strided(layout.shape, layout.strides, layout.offset)
        return self._meta

    @property
    def elements(self) -> torch.Tensor | None:
        """The elements of a constant; None for weights."""
        with without_dispatch():
            base = self.memory.real
            if base is None:
                return None
            elements = torch.empty(0, dtype=self.dtype, device="cpu")
            # `set_` keeps the tensor's strides and shares the memory.
            elements.set_(base.untyped_storage(), self.storage_offset(), tuple(self.shape), self.stride())
            if self.is_conj():
                elements = elements.conj()
            return torch._neg_view(elements) if self.is_neg() else elements

    @refuse_own_errors
    def write(self, new: Value) -> None:
        """Replace the elements, for all views of the memory.

        Raises ConversionError if the write cannot be followed.
        """
        if self.memory.exported:
            raise refusal(
                "a conversion writes weights into a tensor that shares its memory with NumPy; use only torch"
            )
        if self.memory.overlaps is not None:
            raise refusal(
                f"a conversion writes into {list_names(self.value)}, which in the checkpoint shares "
                f"memory with {self.memory.overlaps}; write into a clone"
            )
        steps = self.steps
        if any(step.repeats for step in steps):
            raise refusal(
                f"a conversion writes into an expanded view of {list_names(self.value)}, whose elements "
                "share memory; write into the tensor that it is a view of, or clone it"
            )
        # 1. Forwards: the present contents of each step's base, for elements outside the view.
        values = [self.memory.value]
        for step in steps:
            values.append(step.of(values[-1]).with_strides(step.layout.strides))
        # 2. Backwards: each base with its view replaced, up to the memory itself.
        for step, base in zip(reversed(steps), reversed(values[:-1]), strict=True):
            new = step.written(base, new.with_strides(step.layout.strides))
        self.memory.hold(new)

    def copied(self) -> SymbolicTensor:
        """Copy the tensor and its strides."""
        return SymbolicTensor(Memory.of_value(self.value, self.stride()))

    def become(self, source: SymbolicTensor) -> None:
        """Become another view, as ``t.data = source`` and ``t.t_()`` do.

        Raises UnsupportedVersionError for a torch without the private parts that this needs.
        """
        become_wrapper(self, source)
        self.memory, self.steps = source.memory, source.steps
        self._meta, self._cached = source.meta, None

    # Methods that reach the elements without torch's dispatcher.

    for _name in _MEMORY:
        # One refusal for each name.
        locals()[_name] = _make_refusal(_name)

    def _get_elements(self, asks: str) -> torch.Tensor:
        """Return the elements of a constant. Raises ConversionError for weights."""
        if not self.memory.is_constant:
            raise refusal(
                f"the conversion of {list_names(self)} asks for the values of weights ({asks}); a "
                "conversion must do the same whatever the values are, with torch's own operators"
            )
        assert self.elements is not None, "a constant has elements"
        return self.elements

    def tolist(self) -> Any:
        """Return a constant as Python numbers. Raises ConversionError for weights."""
        return self._get_elements("tolist").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return a constant as an array that shares its memory.

        Raises ConversionError for weights.
        """
        array = self._get_elements("numpy").numpy(force=force)
        # NumPy can write into it from now on, unseen by torch.
        self.memory.exported = True
        return array

    def __array__(self, *args: object, **kwargs: object) -> Any:
        """Return a constant as an array. Raises ConversionError for weights."""
        elements: Any = self._get_elements("numpy")
        self.memory.exported = True
        return elements.__array__(*args, **kwargs)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else repr(self)

    def __copy__(self) -> Any:
        return self.detach()

    def __deepcopy__(self, memo: dict[int, object]) -> Any:
        """Copy the tensor, with memory that other copies share."""
        if id(self) not in memo:
            # Look up the memory, not the tensor: views of one memory share one copy.
            twin: Any = memo.get(id(self.memory))
            if twin is None:
                twin = memo[id(self.memory)] = self.memory.copy()
            memo[id(self)] = copied = SymbolicTensor(twin, self.steps, self.meta if self.steps else None)
            copied._cached = self._cached
            copied.__dict__.update(
                copy.deepcopy({k: v for k, v in self.__dict__.items() if k not in copied.__dict__})
            )
        return memo[id(self)]

    @property
    def data(self) -> Any:
        """The tensor without autograd. Setting a tensor from outside raises ConversionError."""
        return self.detach()

    @data.setter
    def data(self, source: object) -> None:
        if not isinstance(source, SymbolicTensor):
            raise refusal(
                f"the conversion of {list_names(self)} makes a tensor use memory from outside the conversion"
            )
        self.become(source)

    def __repr__(self) -> str:  # type: ignore[override]  # no contents to show
        return f"SymbolicTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has no classmethod here
        cls,
        func: OpOverload,
        types: Iterable[type],
        args: Arguments = (),
        kwargs: Keywords | None = None,
    ) -> object:
        return record(cls, func, args, kwargs or {})


def snapshot(tensor: torch.Tensor) -> SymbolicTensor:
    """Return a converter's result, constants included, in separate memory."""
    if isinstance(tensor, SymbolicTensor):
        return SymbolicTensor(Memory.of_value(tensor.value))
    return SymbolicTensor(Memory.of_value(make_constant(tensor.detach().cpu().clone())))
