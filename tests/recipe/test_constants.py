"""Constants that outlive a conversion become ordinary tensors."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from tests.recipe.test_writes import Tensors, check
from zerostart.recipe import SymbolicTensor
from zerostart.recipe.recording import trace_call


def test_what_a_converter_caches_is_real_afterwards() -> None:
    cached: dict[str, Any] = {}

    @functools.lru_cache
    def table(size: int) -> torch.Tensor:
        return torch.arange(float(size))

    def convert(d: Tensors) -> Tensors:
        cached["whole"] = torch.zeros(3, 4)
        cached["row"] = cached["whole"][1]
        cached["turned"] = cached["whole"].t()
        cached["row"].add_(2)
        cached["list"] = [torch.full((2,), 3, dtype=torch.int8), torch.tensor([1 + 2j]).conj()]
        cached["parameter"] = nn.Parameter(torch.ones(2))
        return {"w": d["w"] * table(6)}

    check(convert)  # eagerly first
    eager = {name: cached[name] for name in ("whole", "row", "turned")}
    for tensor in (table(6), *eager.values(), *cached["list"], cached["parameter"]):
        assert not isinstance(tensor, SymbolicTensor)
    assert table(6).tolist() == [0, 1, 2, 3, 4, 5]
    assert isinstance(cached["parameter"], nn.Parameter)
    assert cached["list"][1].tolist() == [1 - 2j]
    cached["row"].mul_(2)
    assert cached["whole"].tolist() == [[0] * 4, [4] * 4, [0] * 4]
    assert cached["turned"].data_ptr() == cached["whole"].data_ptr()
    nn.functional.linear(torch.ones(1, 6), table(6).view(1, 6)).sum()
    check(convert)  # now with a filled cache


def test_constants_are_real_after_an_error_too() -> None:
    cached = []

    def run() -> None:
        cached.append(torch.ones(2))
        raise KeyError("missing")

    with pytest.raises(KeyError):
        trace_call("the converter", run)
    assert cached[0].tolist() == [1, 1]
