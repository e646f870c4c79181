"""Private parts of torch: tensors without memory that tell the strides of one that has it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any, TypeVar

import torch

from zerostart.upstream.guard import Use, demand

TOUCHED = (
    Use(
        "torch:Tensor",
        "_make_wrapper_subclass",
        "a tensor without memory that has the strides of one with it",
    ),
    Use(
        "torch:_C",
        "_set_throw_on_mutable_data_ptr",
        "whatever asks for the memory that such a tensor lacks gets an error",
    ),
    Use(
        "torch:_C",
        "_set_conj, _set_neg, _dispatch_keys, _additional_keys_to_prop_for_wrapper_tensors",
        "the conjugate and negative bits are the same for a tensor and what wraps it",
    ),
    Use("torch:_C", "_DisableTorchDispatch", "operators run past the modes and classes in Python"),
)
T = TypeVar("T", bound=torch.Tensor)
_CPU = torch.device("cpu")


@functools.cache
def _require() -> None:
    demand(TOUCHED)


def make_wrapper(
    cls: type[T],
    shape: Sequence[int],
    strides: Sequence[int],
    offset: int,
    dtype: torch.dtype,
    bits: torch.Tensor | None = None,
    device: torch.device = _CPU,
) -> T:
    """A tensor of the class ``cls`` on ``device``, as it says, without memory.

    It has the conjugate and negative bits of ``bits``. ``strides`` and ``offset`` are in elements. Whatever
    asks for its memory gets a RuntimeError.
    """
    _require()
    native: ModuleType = torch._C
    make: Any = torch.Tensor._make_wrapper_subclass
    if bits is None:
        made: T = make(cls, shape, strides=strides, storage_offset=offset, dtype=dtype, device=device)
    else:
        # Of the keys only the conjugate and negative bits, as torch's own wrappers take them over.
        keys = native._additional_keys_to_prop_for_wrapper_tensors & native._dispatch_keys(bits)
        options = (None, dtype, torch.strided, device, False, False, None, False, False, keys)
        made = make(cls, shape, strides, offset, *options)
    # Without it an address of nothing would be handed out, and read from.
    native._set_throw_on_mutable_data_ptr(made)
    return made


def become_wrapper(wrapper: torch.Tensor, other: torch.Tensor) -> None:
    """Give ``wrapper`` the dtype, shape, strides and bits of ``other``, which ``make_wrapper`` made too."""
    offset = int(other.storage_offset())
    bare = make_wrapper(type(wrapper), other.shape, other.stride(), offset, other.dtype)
    # Without bits, as ``bare`` has none; at the end they are those of ``other``.
    _set_bits(wrapper, conj=False, neg=False)
    if wrapper.dtype == other.dtype:  # also in inference mode
        with without_dispatch():
            torch.ops.aten.set_.source_Tensor(wrapper, bare)
    else:
        # ``set_`` keeps the dtype; the setter of ``data`` may change it.
        torch.Tensor.data.__set__(wrapper, bare)  # type: ignore[attr-defined]
    _set_bits(wrapper, conj=other.is_conj(), neg=other.is_neg())


def _set_bits(wrapper: torch.Tensor, conj: bool, neg: bool) -> None:
    native: ModuleType = torch._C
    if wrapper.is_conj() != conj:  # only complex tensors have it
        native._set_conj(wrapper, conj)
    if wrapper.is_neg() != neg:
        native._set_neg(wrapper, neg)


def shares_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors, which may be on the meta device, lie in one storage."""
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def resizable(tensor: torch.Tensor) -> bool:
    """Whether torch allocated the memory of ``tensor`` itself; that of an array or buffer it only borrows."""
    return bool(tensor.untyped_storage().resizable())


def without_dispatch() -> contextlib.AbstractContextManager[None]:
    """Inside, operators on ordinary tensors are not seen by ``__torch_dispatch__``, of modes or classes."""
    guard: contextlib.AbstractContextManager[None] = torch._C._DisableTorchDispatch()
    return guard
