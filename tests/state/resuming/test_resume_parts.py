"""Values of a state in JSON, and pruned checkpoints."""

import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from zerostart.errors import ConfigError
from zerostart.state.resuming.retention import list_complete, prune
from zerostart.state.resuming.values import decode, encode_checked


def same_values(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same_values, a, b))
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same_values(a[key], b[key]) for key in a)
    return type(a) is type(b) and (a == b or (a != a and b != b))


def nest(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


VALUES: list[Any] = [
    None,
    [True, 1, 1.5, "text", -0.0, math.inf, -math.inf, math.nan, 1 << 70],
    {"betas": (0.9, 0.999), "nested": {"empty": {}, "list": [(), [()]]}},
    {"$tensor": 1, "$items": ["a"]},
    {"a.b": torch.arange(3), "a": {"b": torch.arange(4)}},
    {"raw": b"\x00\xff", "$bytes": "no bytes"},
    torch.tensor(1e-3, dtype=torch.float64),
    torch.tensor(True),
    [torch.zeros(0, 3), torch.randn(2, 3).bfloat16(), torch.tensor(math.inf)],
    {1: 2, 2.5: None, False: {(1, "a"): [0]}, None: (), "1": 3},
    Counter({30: 1, 80: 2}),
    torch.randn(3, dtype=torch.complex64),
    torch.tensor(2**64 - 1, dtype=torch.uint64),
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_values_survive_json(value: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode_checked(value, "extra", tensors), allow_nan=False)
    assert same_values(value, decode(json.loads(text), tensors))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": "half \ud800"}, "extra would not be read back correctly as JSON"),
        ([10**5000], "extra would not be read back correctly as JSON"),
        (nest(3000), "extra is nested too deeply"),
        (
            {"a": torch.zeros(2, dtype=torch.complex128)},
            r"extra\.a has elements of the type torch",
        ),
        ({"a": torch.eye(2).to_sparse()}, r"extra\.a is a Tensor, but not a dense tensor"),
        ([torch.empty(2, device="meta")], r"extra\.0 is a Tensor, but not a dense tensor"),
    ],
)
def test_unsupported_values_are_named_by_path(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        encode_checked(value, "extra", {})


def write_states(folder: Path, count: int) -> None:
    for number in range(count):
        state = folder / f"step-{number}"
        state.mkdir()
        (state / "weights").write_text("bytes")
        marker = state / "state.json"
        marker.write_text(
            json.dumps({"format": 1, "files": {"weights": {"bytes": 5}}, "extra": {"loss": abs(number - 1)}})
        )
        os.utime(marker, ns=(number, number))


def test_prune_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    write_states(tmp_path, 5)
    (tmp_path / "unfinished").mkdir()
    losses = {3: None, 2: math.nan}
    removed = prune(tmp_path, 2, 1, lambda extra: losses.get(extra["loss"], -extra["loss"]))
    assert [path.name for path in removed] == ["step-0", "step-2"]
    assert [path.name for path in list_complete(tmp_path)] == ["step-1", "step-3", "step-4"]
    assert prune(tmp_path, None) == []
    assert prune(tmp_path, 1, own=lambda extra: extra["loss"] > 9) == []
    assert (tmp_path / "unfinished").is_dir()
    (tmp_path / "step-0").mkdir()
    with pytest.raises(ConfigError, match="keep at least one"):
        prune(tmp_path, 0)
    assert [path.name for path in prune(tmp_path, 1)] == ["step-1", "step-3"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0", "step-4", "unfinished"]
