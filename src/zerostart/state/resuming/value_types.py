"""The closed list of types, beside JSON's and tensors, that a training checkpoint keeps as they are.

Each is written as simpler values of the list, and made again of these by its own constructor. Nothing else
of Python is made of a file: no class that it names, no pickle.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import torch

from zerostart.errors import CheckpointError, ConfigError

#: Kinds of NumPy's dtypes whose elements are their bytes: no objects, no records.
_KINDS = frozenset("biufcSUMm")
#: Bytes of an array that stand in the document itself; those of a larger one are a tensor.
_INLINE = 4096
_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")

#: Writes a value of any type of the list; for what has to be put in an order.
Encoded = Callable[[Any], Any]


@dataclass(frozen=True)
class Form:
    """How values of one type are written: ``simpler`` ones, of which ``made`` makes them again."""

    name: str
    simpler: Callable[[Any, Encoded], Any]
    made: Callable[[Any], Any]


def _ordered(values: Any, encoded: Encoded) -> list[Any]:
    """The elements of a set in an order that is the same on every rank."""
    return sorted(values, key=lambda value: json.dumps(encoded(value), sort_keys=True))


def _array(value: np.ndarray[Any, Any], _: Encoded) -> dict[str, Any]:
    if value.dtype.kind not in _KINDS or value.dtype.char in "gG" or value.dtype.names:
        raise ConfigError(f"an array of {value.dtype} has elements that cannot be saved: convert it")
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


def _to_moment(kind: Any) -> Callable[[dict[str, Any]], Any]:
    def make(found: dict[str, Any]) -> Any:
        value = kind.fromisoformat(found["iso"]).replace(fold=found["fold"])
        return value if found["zone"] is None else value.replace(tzinfo=ZoneInfo(found["zone"]))

    return make


def _to_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"torch has no dtype {name!r}")
    return dtype


def _generator(value: np.random.Generator, _: Encoded) -> Any:
    if type(value.bit_generator).__name__ not in _GENERATORS:
        raise ConfigError(f"{type(value.bit_generator).__name__} is not one of NumPy's own generators")
    return value.bit_generator.state


def _to_generator(state: dict[str, Any]) -> np.random.Generator:
    name = state["bit_generator"]
    if name not in _GENERATORS:
        raise CheckpointError(f"NumPy has no generator {name!r}")
    bits = getattr(np.random, name)(0)
    bits.state = state
    return np.random.Generator(bits)


def _to_random_state(state: dict[str, Any]) -> np.random.RandomState:
    made = np.random.RandomState(0)
    made.set_state(state)
    return made


def _to_random(state: Any) -> random.Random:
    made = random.Random(0)
    made.setstate(state)
    return made


def _text(value: Any, _: Encoded) -> str:
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


def form_of(value: Any) -> Form | None:
    """How ``value`` is written, if it is of a type of the list itself, and of none that derives from one."""
    if isinstance(value, np.dtype):
        return _DTYPE if value.kind in _KINDS and not value.names else None
    return _FORMS.get(type(value))


def may_be_key(value: Any) -> bool:
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
        raise CheckpointError(f"a {name} was written as what makes none: {error}") from error
