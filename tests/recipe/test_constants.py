"""Constants that a conversion makes and that are kept are ordinary tensors when it is done."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from tests.recipe.test_writes import Tensors, check
from zerostart.recipe import SymbolicTensor
from zerostart.recipe.recording import trace_call


def test_what_a_converter_caches_is_real_afterwards() -> None:
    kept: dict[str, Any] = {}

    @functools.lru_cache
    def table(size: int) -> torch.Tensor:
        return torch.arange(float(size))

    def convert(d: Tensors) -> Tensors:
        kept["whole"] = torch.zeros(3, 4)
        kept["row"] = kept["whole"][1]
        kept["turned"] = kept["whole"].t()
        kept["row"].add_(2)
        kept["list"] = [torch.full((2,), 3, dtype=torch.int8), torch.tensor([1 + 2j]).conj()]
        kept["parameter"] = nn.Parameter(torch.ones(2))
        return {"w": d["w"] * table(6)}

    check(convert)  # eagerly first
    eager = {name: kept[name] for name in ("whole", "row", "turned")}
    for tensor in (table(6), *eager.values(), *kept["list"], kept["parameter"]):
        assert not isinstance(tensor, SymbolicTensor)
    assert table(6).tolist() == [0, 1, 2, 3, 4, 5]
    assert isinstance(kept["parameter"], nn.Parameter)
    assert kept["list"][1].tolist() == [1 - 2j]
    kept["row"].mul_(2)
    assert kept["whole"].tolist() == [[0] * 4, [4] * 4, [0] * 4]
    assert kept["turned"].data_ptr() == kept["whole"].data_ptr()
    nn.functional.linear(torch.ones(1, 6), table(6).view(1, 6)).sum()
    check(convert)  # now with a cache that is filled


def test_constants_are_real_after_an_error_too() -> None:
    kept = []

    def run() -> None:
        kept.append(torch.ones(2))
        raise KeyError("missing")

    with pytest.raises(KeyError):
        trace_call("the converter", run)
    assert kept[0].tolist() == [1, 1]
