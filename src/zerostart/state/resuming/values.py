"""Write what a training state holds besides tensors as JSON, and read it back as it was.

Values are None, booleans, numbers, strings, bytes, tensors, and lists, tuples, dictionaries and counters of
these. Nothing is pickled.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from zerostart.checkpoint.strict_json import MAX_JSON_BYTES
from zerostart.errors import CheckpointError, ConfigError
from zerostart.recipe import spelling, torch_dtype

#: Keys of the forms that JSON does not have; a dict with one of these keys is written as a list of its items.
_TENSOR, _SCALAR, _TUPLE, _FLOAT = "$tensor", "$scalar", "$tuple", "$float"
_ITEMS, _COUNTER, _BYTES, _TYPE = "$items", "$counter", "$bytes", "$type"
_MARKS = (_TENSOR, _SCALAR, _TUPLE, _FLOAT, _ITEMS, _COUNTER, _BYTES, _TYPE)
#: Maximum size of one value in the document, in bytes.
_MAX_VALUE_BYTES = MAX_JSON_BYTES // 4
_REMEDY = "pass what describes it, such as its state_dict(), and build it again of that"


def encoded_whole(value: object, where: str, tensors: dict[str, torch.Tensor]) -> object:
    """Encode a value of any size and depth, and check that it can be read again.

    Raises ConfigError for what a document in JSON could not have, or not give back.
    """
    try:
        found = encoded(value, where, tensors)
        text = json.dumps({where: found}, ensure_ascii=False).encode()
        json.loads(text)
    except RecursionError:
        raise ConfigError(f"{where} is nested too deeply, or contains itself: {_REMEDY}") from None
    except ConfigError:
        raise
    except ValueError as error:  # half a surrogate pair, an integer of thousands of digits
        raise ConfigError(f"{where} would not be read back correctly as JSON: {error}") from None
    if len(text) > _MAX_VALUE_BYTES:
        raise ConfigError(
            f"{where} has {len(text)} bytes as JSON, but at most {_MAX_VALUE_BYTES} are saved: put it "
            "into tensors"
        )
    return found


def checksum(written: Any, tensors: Mapping[str, torch.Tensor]) -> int:
    """Return a number that is the same on ranks that have written the same with the same ``tensors``."""
    found = zlib.crc32(json.dumps(written, sort_keys=True).encode())
    for name, tensor in tensors.items():
        whole = tensor.cpu().contiguous().reshape(-1)
        bits = torch.view_as_real(whole) if whole.is_complex() else whole
        found = zlib.crc32(bits.view(torch.uint8).numpy().data, zlib.crc32(name.encode(), found))
    return found


def encoded(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> object:
    """Return ``value`` as JSON; its tensors of one dimension or more are put into ``tensors``.

    NumPy's numbers and those of enumerations become Python's. Raises ConfigError, naming the place, for
    values of other types.
    """
    if isinstance(value, np.generic):  # before Python's numbers, from which some derive
        value = value.item()
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: repr(float(value))}
    if type(value) is bytes:
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        return _tensor(value, where, tensors)
    if type(value) is tuple:
        return {_TUPLE: [encoded(v, f"{where}.{i}", tensors) for i, v in enumerate(value)]}
    if isinstance(value, list):
        return [encoded(v, f"{where}.{i}", tensors) for i, v in enumerate(value)]
    if isinstance(value, Mapping) and all(_is_key(key) for key in value):
        items = [(encoded(k, where, {}), encoded(v, f"{where}.{k}", tensors)) for k, v in value.items()]
        if isinstance(value, Counter):
            return {_COUNTER: items}
        # A dict whose keys JSON has not, or that looks like one of our forms, is written as pairs.
        plain = all(isinstance(key, str) and key not in _MARKS for key in value)
        return dict(items) if plain else {_ITEMS: items}
    raise ConfigError(
        f"{where} is a {type(value).__name__}, which is neither a JSON value nor a tensor: {_REMEDY}"
    )


def _is_key(key: object) -> bool:
    if type(key) is tuple:
        return all(_is_key(part) for part in key)
    return key is None or isinstance(key, (bool, str)) or type(key) in (int, float, bytes)


def _tensor(value: torch.Tensor, where: str, tensors: dict[str, torch.Tensor]) -> object:
    dense = value.layout is torch.strided and not value.is_nested and not value.is_quantized
    if isinstance(value, DTensor) or not dense or value.is_meta:
        raise ConfigError(
            f"{where} is a {type(value).__name__}, but not a dense tensor of this rank (it is "
            "sharded, sparse, nested, quantised, or on the meta device): pass a plain one"
        )
    held = value.detach().resolve_conj().resolve_neg()
    kind = spelling(held.dtype, where)
    # Thousands of ``step`` tensors would be as many entries in the files.
    if held.dim() == 0 and not held.is_complex():
        return {_SCALAR: encoded(held.item(), where, tensors), "dtype": kind}
    while where in tensors:
        where += "'"  # Two places may have one name, where keys have dots.
    tensors[where] = held
    return {_TENSOR: where}


def decoded(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return what ``encoded`` was given; raises KeyError for a tensor that is not in ``tensors``."""
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
    if _BYTES in value:
        return base64.b64decode(value[_BYTES])
    if _COUNTER in value:
        return Counter({decoded(k, {}): decoded(v, tensors) for k, v in value[_COUNTER]})
    if _TYPE in value:
        raise CheckpointError(
            f"the state has a {value[_TYPE]}, which this version does not read: load it with the version "
            "that saved it, and save it again without"
        )
    items = value[_ITEMS] if _ITEMS in value else value.items()
    return {decoded(k, {}): decoded(v, tensors) for k, v in items}


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype that safetensors spells so."""
    return torch_dtype(name, name)
