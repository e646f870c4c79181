"""Constants that a conversion makes and that are kept are ordinary tensors when it is done."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

import zerostart
from tests.recipe.test_writes import Tensors, check
from zerostart.errors import ConversionError
from zerostart.recipe import SymbolicTensor
from zerostart.recipe.recording import recorded


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
        recorded("the converter", run)
    assert kept[0].tolist() == [1, 1]


def test_a_default_device_is_that_of_the_converter_s_own_tensors_alone() -> None:
    def changed(d: Tensors) -> Tensors:
        w, u = d["w"], d["u"]
        w[::2].mul_(2)
        u.reshape(-1)[:5].zero_()
        padded = nn.functional.pad(w, (1, 2, 0, 1), value=3.0)
        return {"w": w, "u": u, "padded": padded, "power": 2**w, "filled": w[1:].clone().fill_(2)}

    def convert(d: Tensors) -> Tensors:
        with torch.device("meta" if isinstance(d["w"], SymbolicTensor) else "cpu"):
            return changed(d)

    check(convert)

    def mixed(d: Tensors) -> Tensors:
        return {"w": d["w"] * torch.ones(6, device="meta" if isinstance(d["w"], SymbolicTensor) else "cpu")}

    with pytest.raises(ConversionError):
        check(mixed)


def test_what_a_module_s_loading_leaves_on_it_is_real() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2, 3))
            self.n = nn.Parameter(torch.zeros(3))

        def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
            self.scale = torch.arange(3.0)
            state["w"] = state["w"] * self.scale
            self.n = nn.Parameter(torch.full((3,), 4.0))
            state.setdefault("n", torch.full((3,), 5.0))
            super()._load_from_state_dict(state, prefix, *rest)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.w.t() + (self.scale + self.n).sum()

    source = {"w": torch.arange(6.0).view(2, 3)}
    expected = Scaled()
    expected.load_state_dict(source)
    made = zerostart.load(source, Scaled, engine="fsdp2", zero_stage=0, progress=False)
    assert torch.equal(made(torch.ones(1, 3)), expected(torch.ones(1, 3)))
    assert not isinstance(made.scale, SymbolicTensor)
