"""JSON values with tensors in them: what a training checkpoint keeps beside its logical tensors.

Tuples, numbers that JSON lacks, and dicts that look like what is written here have a form of their own, so
that a value comes back as it was. Nothing is ever pickled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from zerostart.errors import ConfigError
from zerostart.recipe import torch_dtype

__all__ = ["decoded", "dtype_name", "dtype_of", "encoded"]

#: Keys of the forms; a dict with one of these keys is written as a list of its items.
_TENSOR, _SCALAR, _TUPLE, _FLOAT, _ITEMS = "$tensor", "$scalar", "$tuple", "$float", "$items"
_FORMS = (_TENSOR, _SCALAR, _TUPLE, _FLOAT, _ITEMS)


def encoded(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """``value`` as JSON; its tensors of one dimension or more are put into ``tensors``, named from ``where``.

    Raises ConfigError, naming the place, for what is no JSON value and no tensor.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_FLOAT: repr(value)}
    if isinstance(value, torch.Tensor):
        held = value.detach()
        if held.dim() == 0 and not held.is_complex():
            return {_SCALAR: encoded(held.item(), where, tensors), "dtype": dtype_name(held.dtype)}
        while where in tensors:
            where += "'"  # Two places may have one name, where keys have dots.
        tensors[where] = held
        return {_TENSOR: where}
    if isinstance(value, tuple) and type(value) is tuple:
        return {_TUPLE: [encoded(v, f"{where}.{i}", tensors) for i, v in enumerate(value)]}
    if isinstance(value, list):
        return [encoded(v, f"{where}.{i}", tensors) for i, v in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        items = {key: encoded(v, f"{where}.{key}", tensors) for key, v in value.items()}
        return items if not any(form in items for form in _FORMS) else {_ITEMS: list(items.items())}
    raise ConfigError(
        f"{where} is a {type(value).__name__}, which is no JSON value and no tensor: pass what describes it, "
        "such as its state_dict(), and build it again of that"
    )


def decoded(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What ``encoded`` was given; raises KeyError for a tensor that is not in ``tensors``."""
    if isinstance(value, list):
        return [decoded(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _SCALAR in value:
        dtype = dtype_of(value["dtype"])
        return torch.tensor(decoded(value[_SCALAR], tensors), dtype=dtype, device="cpu")
    if _TUPLE in value:
        return tuple(decoded(v, tensors) for v in value[_TUPLE])
    if _FLOAT in value:
        return float(value[_FLOAT])
    items = value[_ITEMS] if _ITEMS in value else value.items()
    return {key: decoded(v, tensors) for key, v in items}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype as safetensors spells it."""
    from zerostart.checkpoint.catalog import TORCH_NAMES

    return TORCH_NAMES[str(dtype).removeprefix("torch.")]


def dtype_of(name: str) -> torch.dtype:
    """The dtype that safetensors spells so."""
    return torch_dtype(name, name)
