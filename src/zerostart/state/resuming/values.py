"""JSON values with tensors in them: what a training checkpoint keeps beside its logical tensors.

Tuples, counters, bytes, numbers that JSON lacks, dicts with keys that are no strings, and dicts that look
like what is written here have a form of their own, as have the types in ``value_types``, so that a value
comes back as it was. Nothing is pickled.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import random
import zlib
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from zerostart.checkpoint.strict_json import MAX_JSON_BYTES, load_json
from zerostart.errors import CheckpointError, ConfigError
from zerostart.recipe import spelling, torch_dtype

#: Kinds of NumPy's dtypes whose elements are their bytes: no objects, no records.
_KINDS = frozenset("biufcSUMm")
#: Bytes of an array that stand in the document itself; those of a larger one are a tensor.
_INLINE = 4096
_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")

#: Writes a value of any type of the list; for what has to be put in an order.
Encoded = Callable[[Any], object]


@dataclass(frozen=True)
class Form:
    """How values of one type are written: ``simpler`` ones, of which ``made`` makes them again."""

    name: str
    simpler: Callable[[Any, Encoded], object]
    made: Callable[[Any], object]


def _ordered(values: Any, encoded: Encoded) -> list[object]:
    """The elements of a set in an order that is the same on every rank."""
    return sorted(values, key=lambda value: json.dumps(encoded(value), sort_keys=True))


def _array(value: np.ndarray[Any, Any], _: Encoded) -> dict[str, object]:
    if value.dtype.kind not in _KINDS or value.dtype.char in "gG" or value.dtype.names:
        raise ConfigError(
            f"an array of {value.dtype} has elements that cannot be saved: convert it to an array of numbers"
        )
    raw = value.tobytes()
    data = raw if len(raw) <= _INLINE else torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return {"dtype": value.dtype.str, "shape": list(value.shape), "data": data}


def _to_array(found: dict[str, Any]) -> np.ndarray[Any, Any]:
    data = found["data"]
    raw = data.numpy().tobytes() if isinstance(data, torch.Tensor) else data
    return np.frombuffer(raw, dtype=_to_numpy_dtype(found["dtype"])).reshape(found["shape"]).copy()


def _to_numpy_dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.kind not in _KINDS or dtype.names:
        raise CheckpointError(f"{name!r} is not an array dtype that can be saved")
    return dtype


def _moment(value: Any, _: Encoded) -> dict[str, Any]:
    """A ``datetime`` or a ``time``, with its time zone by its offset or its name."""
    if value.tzinfo is not None and type(value.tzinfo) not in (timezone, ZoneInfo):
        raise ConfigError(f"the time zone {value.tzinfo!r} cannot be saved: use timezone or ZoneInfo")
    zone = value.tzinfo.key if isinstance(value.tzinfo, ZoneInfo) else None
    local = value.replace(tzinfo=None) if zone else value
    return {"iso": local.isoformat(), "zone": zone, "fold": value.fold}


def _to_moment(kind: Any) -> Callable[[dict[str, object]], Any]:
    def make(found: dict[str, Any]) -> Any:
        value = kind.fromisoformat(found["iso"]).replace(fold=found["fold"])
        return value if found["zone"] is None else value.replace(tzinfo=ZoneInfo(found["zone"]))

    return make


def _to_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"torch has no dtype {name!r}")
    return dtype


def _generator(value: np.random.Generator, _: Encoded) -> object:
    if type(value.bit_generator).__name__ not in _GENERATORS:
        raise ConfigError(f"{type(value.bit_generator).__name__} is not one of NumPy's own generators")
    return value.bit_generator.state


def _to_generator(state: dict[str, object]) -> np.random.Generator:
    name = state["bit_generator"]
    if name not in _GENERATORS:
        raise CheckpointError(f"NumPy has no generator {name!r}")
    bits = getattr(np.random, name)(0)
    bits.state = state
    return np.random.Generator(bits)


def _to_random_state(state: dict[str, object]) -> np.random.RandomState:
    made = np.random.RandomState(0)
    made.set_state(state)
    return made


def _to_random(state: Any) -> random.Random:
    made = random.Random(0)
    made.setstate(state)
    return made


def _text(value: object, _: Encoded) -> str:
    return str(value)


def _listed(value: Any, _: Encoded) -> list[Any]:
    return list(value)


_FORMS: dict[type, Form] = {
    set: Form("set", _ordered, set),
    frozenset: Form("frozenset", _ordered, frozenset),
    argparse.Namespace: Form(
        "argparse.Namespace", lambda v, _: dict(vars(v)), lambda found: argparse.Namespace(**found)
    ),
    SimpleNamespace: Form(
        "SimpleNamespace", lambda v, _: dict(vars(v)), lambda found: SimpleNamespace(**found)
    ),
    deque: Form("deque", lambda v, _: [list(v), v.maxlen], lambda found: deque(*found)),
    range: Form("range", lambda v, _: [v.start, v.stop, v.step], lambda found: range(*found)),
    bytearray: Form("bytearray", lambda v, _: bytes(v), bytearray),
    complex: Form("complex", lambda v, _: [v.real, v.imag], lambda found: complex(*found)),
    PosixPath: Form("Path", _text, Path),
    PurePosixPath: Form("PurePosixPath", _text, PurePosixPath),
    PureWindowsPath: Form("PureWindowsPath", _text, PureWindowsPath),
    date: Form("date", lambda v, _: v.isoformat(), date.fromisoformat),
    datetime: Form("datetime", _moment, _to_moment(datetime)),
    time: Form("time", _moment, _to_moment(time)),
    timedelta: Form(
        "timedelta", lambda v, _: [v.days, v.seconds, v.microseconds], lambda found: timedelta(*found)
    ),
    random.Random: Form("random.Random", lambda v, _: v.getstate(), _to_random),
    torch.Size: Form("torch.Size", _listed, torch.Size),
    torch.dtype: Form("torch.dtype", lambda v, _: str(v).removeprefix("torch."), _to_dtype),
    torch.device: Form("torch.device", _text, torch.device),
    np.ndarray: Form("numpy.ndarray", _array, _to_array),
    np.datetime64: Form("numpy.datetime64", lambda v, _: np.asarray(v), lambda found: found[()]),
    np.timedelta64: Form("numpy.timedelta64", lambda v, _: np.asarray(v), lambda found: found[()]),
    np.random.RandomState: Form(
        "numpy.random.RandomState", lambda v, _: v.get_state(legacy=False), _to_random_state
    ),
    np.random.Generator: Form("numpy.random.Generator", _generator, _to_generator),
}
_DTYPE = Form("numpy.dtype", lambda v, _: v.str, _to_numpy_dtype)
_BY_NAME = {form.name: form for form in (*_FORMS.values(), _DTYPE)}
#: Types of the list that may be keys of a dict: they are told apart by what is written of them.
_KEYS = (bytes, complex, frozenset, date, datetime, time, timedelta, torch.dtype, torch.Size)
_PATHS = (PosixPath, PurePosixPath, PureWindowsPath)


def form_of(value: object) -> Form | None:
    """How ``value`` is written, if it is of a type of the list itself, and of none that derives from one."""
    if isinstance(value, np.dtype):
        return _DTYPE if value.kind in _KINDS and not value.names else None
    return _FORMS.get(type(value))


def may_be_key(value: object) -> bool:
    """Whether ``value`` is of a type of the list that is kept as a key of a dict."""
    return type(value) in (*_KEYS, *_PATHS)


def made(name: str, simpler: Any) -> Any:
    """What was written as ``simpler`` under a form's ``name``; raises CheckpointError for what is none."""
    form = _BY_NAME.get(name) if isinstance(name, str) else None
    if form is None:
        raise CheckpointError(f"{name!r} is not a type that this version knows: update zerostart")
    try:
        return form.made(simpler)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"a {name} in the state was written with arguments that do not make one: {error}"
        ) from error


#: Keys of the forms; a dict with one of these keys is written as a list of its items.
_TENSOR, _SCALAR, _TUPLE, _FLOAT, _ITEMS, _COUNTER, _BYTES, _TYPE = (
    "$tensor",
    "$scalar",
    "$tuple",
    "$float",
    "$items",
    "$counter",
    "$bytes",
    "$type",
)
_MARKS = (_TENSOR, _SCALAR, _TUPLE, _FLOAT, _ITEMS, _COUNTER, _BYTES, _TYPE)
#: Most bytes that one value takes in the document, which has to be read again.
_MOST = MAX_JSON_BYTES // 4
_REMEDY = "pass what describes it, such as its state_dict(), and build it again of that"


def encoded_whole(value: object, where: str, tensors: dict[str, torch.Tensor]) -> object:
    """``encoded``, of a value of any size and depth, which is known to be readable again.

    Raises ConfigError for what a document in JSON could not have, or not give back.
    """
    try:
        found = encoded(value, where, tensors)
        text = json.dumps({where: found}, ensure_ascii=False).encode()
        # Read once, now: what cannot be read again has to fail the save and not the resumption.
        load_json(text, where, "value", any_number=True)
    except RecursionError:
        raise ConfigError(f"{where} is nested too deeply, or contains itself: {_REMEDY}") from None
    except ConfigError:
        raise
    except (ValueError, CheckpointError) as error:  # half a surrogate pair, an integer of thousands of digits
        raise ConfigError(f"{where} would not be read back correctly as JSON: {error}") from None
    if len(text) > _MOST:
        raise ConfigError(
            f"{where} has {len(text)} bytes as JSON, but at most {_MOST} are saved: put it into tensors"
        )
    return found


def checksum(written: Any, tensors: Mapping[str, torch.Tensor]) -> int:
    """A number that ranks have in common that have written the same, with the same ``tensors``."""
    found = zlib.crc32(json.dumps(written, sort_keys=True).encode())
    for name, tensor in tensors.items():
        whole = tensor.cpu().contiguous().reshape(-1)
        bits = torch.view_as_real(whole) if whole.is_complex() else whole
        found = zlib.crc32(bits.view(torch.uint8).numpy().data, zlib.crc32(name.encode(), found))
    return found


def encoded(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> object:
    """``value`` as JSON; its tensors of one dimension or more are put into ``tensors``, named from ``where``.

    NumPy's numbers and those of enumerations become Python's. Raises ConfigError, naming the place, for what
    is no JSON value and no tensor.
    """
    # The order of the cases matters: bool before int, which it is too; numbers of NumPy before all, since
    # some derive from Python's.
    if isinstance(value, np.generic) and form_of(value) is None:
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
    if isinstance(value, tuple) and type(value) is tuple:
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
    if (form := form_of(value)) is not None:
        try:
            simpler = form.simpler(value, lambda one: encoded(one, where, {}))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        return {_TYPE: form.name, "of": encoded(simpler, where, tensors)}
    raise ConfigError(
        f"{where} is a {type(value).__name__}, which is neither a JSON value nor a tensor: {_REMEDY}"
    )


def _is_key(key: object) -> bool:
    if type(key) is tuple:
        return all(_is_key(part) for part in key)
    return key is None or isinstance(key, (bool, str)) or type(key) in (int, float) or may_be_key(key)


def _tensor(value: torch.Tensor, where: str, tensors: dict[str, torch.Tensor]) -> object:
    dense = value.layout is torch.strided and not value.is_nested and not value.is_quantized
    if isinstance(value, DTensor) or not dense or value.is_meta:
        raise ConfigError(
            f"{where} is a {type(value).__name__}, but not a dense tensor of this rank (it is "
            "sharded, sparse, nested, quantised, or on the meta device): pass a plain one"
        )
    held = value.detach().resolve_conj().resolve_neg()
    kind = spelling(held.dtype, where)
    # A tensor of one number goes into the document itself: thousands of ``step`` tensors would be as many
    # entries in the files.
    if held.dim() == 0 and not held.is_complex():
        return {_SCALAR: encoded(held.item(), where, tensors), "dtype": kind}
    while where in tensors:
        where += "'"  # Two places may have one name, where keys have dots.
    tensors[where] = held
    return {_TENSOR: where}


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
    if _BYTES in value:
        return base64.b64decode(value[_BYTES])
    if _COUNTER in value:
        return Counter({decoded(k, {}): decoded(v, tensors) for k, v in value[_COUNTER]})
    if _TYPE in value:
        return made(value[_TYPE], decoded(value["of"], tensors))
    items = value[_ITEMS] if _ITEMS in value else value.items()
    return {decoded(k, {}): decoded(v, tensors) for k, v in items}


def dtype_of(name: str) -> torch.dtype:
    """The dtype that safetensors spells so."""
    return torch_dtype(name, name)
