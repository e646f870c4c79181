"""Private parts of torch: tensors without memory that tell the strides of one that has it.

Known for the versions in ``upstream.torch.SUPPORTED``. Used of it: ``Tensor._make_wrapper_subclass``,
``torch._C._set_throw_on_mutable_data_ptr``, which makes every access to the memory that such a tensor lacks
an error, and the conjugate and negative bits with their dispatch keys, which are the same for a tensor and
what wraps it. ``torch._C._DisableTorchDispatch`` has operators run past the modes and classes in Python.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from zerostart.upstream.torch import SUPPORTED
from zerostart.upstream.versions import demand

__all__ = ["become_wrapper", "make_wrapper", "resizable", "shares_storage", "without_dispatch"]

T = TypeVar("T", bound=torch.Tensor)


@functools.cache
def _require() -> None:
    """Raise UnsupportedVersionError unless everything that this file uses is there."""
    bits = ("_set_conj", "_set_neg", "_dispatch_keys", "_additional_keys_to_prop_for_wrapper_tensors")
    demand(
        torch,
        SUPPORTED,
        (
            (torch.Tensor, ("_make_wrapper_subclass",)),
            (torch._C, ("_set_throw_on_mutable_data_ptr", "_DisableTorchDispatch", *bits)),
        ),
    )


def make_wrapper(
    cls: type[T],
    shape: Sequence[int],
    strides: Sequence[int],
    offset: int,
    dtype: torch.dtype,
    bits: torch.Tensor | None = None,
) -> T:
    """A tensor of the class ``cls`` on the CPU, without memory.

    It has the conjugate and negative bits of ``bits``. ``strides`` and ``offset`` are in elements. Whatever
    asks for its memory gets a RuntimeError.
    """
    _require()
    native: Any = torch._C
    make: Any = torch.Tensor._make_wrapper_subclass
    cpu = torch.device("cpu")
    if bits is None:
        made: T = make(cls, shape, strides=strides, storage_offset=offset, dtype=dtype, device=cpu)
    else:
        keys = native._additional_keys_to_prop_for_wrapper_tensors & native._dispatch_keys(bits)
        options = (None, dtype, torch.strided, cpu, False, False, None, False, False, keys)
        made = make(cls, shape, strides, offset, *options)
    native._set_throw_on_mutable_data_ptr(made)
    return made


def become_wrapper(wrapper: torch.Tensor, other: torch.Tensor) -> None:
    """Give ``wrapper`` the dtype, shape, strides and bits of ``other``, which ``make_wrapper`` made too."""
    offset = int(other.storage_offset())
    bare = make_wrapper(type(wrapper), other.shape, other.stride(), offset, other.dtype)
    _set_bits(wrapper, conj=False, neg=False)
    if wrapper.dtype == other.dtype:  # also in inference mode
        with without_dispatch():
            torch.ops.aten.set_.source_Tensor(wrapper, bare)
    else:
        torch.Tensor.data.__set__(wrapper, bare)  # type: ignore[attr-defined]
    _set_bits(wrapper, conj=other.is_conj(), neg=other.is_neg())


def _set_bits(wrapper: torch.Tensor, conj: bool, neg: bool) -> None:
    native: Any = torch._C
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
