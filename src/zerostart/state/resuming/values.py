"""Encode the values of a training state as JSON, and decode them.

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
from zerostart.errors import ConfigError
from zerostart.recipe import spelling, torch_dtype

#: Keys that mark values which JSON lacks; a dict with such a key is written as a list of its items.
_TENSOR, _SCALAR, _TUPLE, _FLOAT = "$tensor", "$scalar", "$tuple", "$float"
_ITEMS, _COUNTER, _BYTES = "$items", "$counter", "$bytes"
_MARKS = (_TENSOR, _SCALAR, _TUPLE, _FLOAT, _ITEMS, _COUNTER, _BYTES)
#: Maximum size of one encoded value, in bytes.
_MAX_VALUE_BYTES = MAX_JSON_BYTES // 4
_REMEDY = "pass its state, such as state_dict(), and rebuild it from that"


def encode_checked(value: object, where: str, tensors: dict[str, torch.Tensor]) -> object:
    """Encode a value, and check that the document can hold it.

    Raises ConfigError for a value that JSON cannot hold or return.
    """
    try:
        data = encode(value, where, tensors)
        text = json.dumps({where: data}, ensure_ascii=False).encode()
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
    return data


def checksum(written: Any, tensors: Mapping[str, torch.Tensor]) -> int:
    """Return a checksum of an encoded value and its ``tensors``."""
    crc = zlib.crc32(json.dumps(written, sort_keys=True).encode())
    for name, tensor in tensors.items():
        whole = tensor.cpu().contiguous().reshape(-1)
        bits = torch.view_as_real(whole) if whole.is_complex() else whole
        crc = zlib.crc32(bits.view(torch.uint8).numpy().data, zlib.crc32(name.encode(), crc))
    return crc


def encode(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> object:
    """Return ``value`` as JSON, and put its tensors into ``tensors``.

    Tensors without dimensions become numbers. Numbers of NumPy and of enumerations become Python's. Raises
    ConfigError, which names the place, for values of other types.
    """
    if isinstance(value, np.generic):  # first, since some derive from Python's numbers
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
        return _encode_tensor(value, where, tensors)
    if type(value) is tuple:
        return {_TUPLE: [encode(v, f"{where}.{i}", tensors) for i, v in enumerate(value)]}
    if isinstance(value, list):
        return [encode(v, f"{where}.{i}", tensors) for i, v in enumerate(value)]
    if isinstance(value, Mapping) and all(_is_key(key) for key in value):
        items = [(encode(k, where, {}), encode(v, f"{where}.{k}", tensors)) for k, v in value.items()]
        if isinstance(value, Counter):
            return {_COUNTER: items}
        # Write pairs if JSON cannot hold the keys, or if a key is a mark.
        plain = all(isinstance(key, str) and key not in _MARKS for key in value)
        return dict(items) if plain else {_ITEMS: items}
    raise ConfigError(
        f"{where} is a {type(value).__name__}, which is neither a JSON value nor a tensor: {_REMEDY}"
    )


def _is_key(key: object) -> bool:
    if type(key) is tuple:
        return all(_is_key(part) for part in key)
    return key is None or isinstance(key, (bool, str)) or type(key) in (int, float, bytes)


def _encode_tensor(value: torch.Tensor, where: str, tensors: dict[str, torch.Tensor]) -> object:
    dense = value.layout is torch.strided and not value.is_nested and not value.is_quantized
    if isinstance(value, DTensor) or not dense or value.is_meta:
        raise ConfigError(
            f"{where} is a {type(value).__name__}, but not a dense tensor of this rank (it is "
            "sharded, sparse, nested, quantised, or on the meta device): pass a plain one"
        )
    tensor = value.detach().resolve_conj().resolve_neg()
    kind = spelling(tensor.dtype, where)
    # Thousands of ``step`` tensors would become entries of the files.
    if tensor.dim() == 0 and not tensor.is_complex():
        return {_SCALAR: encode(tensor.item(), where, tensors), "dtype": kind}
    while where in tensors:
        where += "'"  # keys with dots may give two places one name
    tensors[where] = tensor
    return {_TENSOR: where}


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Decode the result of ``encode``. Raises KeyError for a missing tensor."""
    if isinstance(value, list):
        return [decode(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _SCALAR in value:
        dtype = dtype_of(value["dtype"])
        return torch.tensor(decode(value[_SCALAR], tensors), dtype=dtype, device="cpu")
    if _TUPLE in value:
        return tuple(decode(v, tensors) for v in value[_TUPLE])
    if _FLOAT in value:
        return float(value[_FLOAT])
    if _BYTES in value:
        return base64.b64decode(value[_BYTES])
    if _COUNTER in value:
        return Counter({decode(k, {}): decode(v, tensors) for k, v in value[_COUNTER]})
    items = value[_ITEMS] if _ITEMS in value else value.items()
    return {decode(k, {}): decode(v, tensors) for k, v in items}


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype with the given name in safetensors."""
    return torch_dtype(name, name)
