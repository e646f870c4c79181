"""What a script pickles beside its model comes back equal, without a pickle; all else is refused by name."""

import argparse
import collections
import datetime
import enum
import json
import random
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch

import zerostart
from zerostart.errors import CheckpointError, ConfigError
from zerostart.state.resuming.values import checksum, decoded, encoded_whole

NOW = datetime.datetime(2026, 11, 23, 13, 20, 7, 123456)
KEPT: list[Any] = [
    argparse.Namespace(lr=0.1, out=Path("a/b"), nested=argparse.Namespace(x={1, 2})),
    SimpleNamespace(a=[1]),
    {1, "two", (3, 4), frozenset({5.5, None})},
    frozenset(),
    Path("/tmp/x"),
    PurePosixPath("x"),
    PureWindowsPath("c:\\x"),
    torch.Size([2, 3]),
    torch.bfloat16,
    torch.device("cuda", 1),
    np.dtype(">i4"),
    NOW,
    NOW.replace(tzinfo=datetime.timezone(datetime.timedelta(hours=5, minutes=30))),
    NOW.replace(tzinfo=ZoneInfo("UTC"), fold=1),
    datetime.date(2026, 2, 28),
    datetime.time(1, 2, 3, 4),
    datetime.timedelta(days=-1, microseconds=3),
    complex(1.5, -0.0),
    bytearray(b"\x00\xff"),
    collections.deque([1, 2], maxlen=5),
    range(1, 10, 3),
    np.datetime64("2026-11-23T13:20:07.123456789"),
    np.timedelta64(5, "ns"),
    {Path("a"): torch.float16, NOW: b"x", frozenset({1}): 2, b"key": 3},
    {"$type": "set", "of": [1]},
]
ARRAYS: list[np.ndarray[Any, Any]] = [
    np.arange(5000, dtype=np.uint32),
    np.array(3.5, dtype=">f4"),
    np.zeros((0, 3), dtype=np.float16),
    np.array([["a", "bcd"]]),
    np.array([1 + 2j], dtype=np.complex64),
    np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.array(["2026-01-01", "NaT"], dtype="M8[D]"),
]


def there_and_back(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encoded_whole(value, "value", tensors))
    return decoded(json.loads(text), tensors)


@pytest.mark.parametrize("value", KEPT, ids=lambda value: type(value).__name__)
def test_a_value_comes_back(value: Any) -> None:
    found = there_and_back(value)
    assert found == value
    assert type(found) is type(value)
    assert repr(found) == repr(value) or isinstance(value, (set, dict, argparse.Namespace))


@pytest.mark.parametrize("value", ARRAYS, ids=lambda value: str(value.dtype))
def test_an_array_comes_back(value: np.ndarray[Any, Any]) -> None:
    found = there_and_back([value])[0]
    assert found.dtype == value.dtype
    assert found.shape == value.shape
    assert found.tobytes() == value.tobytes()
    found[...] = found  # which can be written to


def test_random_states_go_on() -> None:
    np.random.seed(3)
    generator, old, pythons = np.random.default_rng(1), np.random.RandomState(2), random.Random(3)
    generator.random(), old.randn(), pythons.random()
    found = there_and_back([np.random.get_state(), generator, old, pythons, random.getstate()])
    wanted = np.random.rand()
    np.random.set_state(found[0])
    assert np.random.rand() == wanted
    assert found[1].random() == generator.random()
    assert found[2].randn() == old.randn()
    assert found[3].random() == pythons.random()
    random.setstate(found[4])


def test_sets_are_written_alike_in_any_order() -> None:
    sums = set()
    for values in (["b", "a", "c"], ["c", "b", "a"]):
        tensors: dict[str, torch.Tensor] = {}
        sums.add(checksum(encoded_whole({"x": set(dict.fromkeys(values))}, "value", tensors), tensors))
    assert len(sums) == 1


class Colour(enum.Enum):
    RED = object()


class Own(argparse.Namespace):
    pass


Pair = collections.namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "value", [Colour.RED, Own(a=1), Pair(1, 2), np.array([object()]), np.zeros(1, "i4,i4"), lambda: 0]
)
def test_what_is_not_in_the_list_is_refused_by_name(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"extra\.x"):
        zerostart.save_state(tmp_path / "state", torch.nn.Linear(1, 1), extra={"x": value})
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    "value",
    [
        {"$type": "os.system", "of": "ls"},
        {"$type": "torch.dtype", "of": "load"},
        {"$type": "numpy.dtype", "of": "O"},
        {"$type": "numpy.random.Generator", "of": {"bit_generator": "seed"}},
        {"$type": "numpy.ndarray", "of": {"dtype": "<f8", "shape": [9], "data": {"$bytes": "AAAA"}}},
        {"$type": "date", "of": 7},
    ],
    ids=lambda value: value["$type"],
)
def test_a_file_makes_nothing_else(value: Any) -> None:
    with pytest.raises(CheckpointError):
        decoded(value, {})
