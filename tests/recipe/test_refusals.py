"""Refusals are raised even if the converter catches all errors."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import zerostart
from tests.recipe.test_writes import Tensors, check
from zerostart.errors import ConversionError
from zerostart.recipe.values import HANDLERS

aten = torch.ops.aten
Change = Callable[[torch.Tensor], torch.Tensor]


def tried(change: Change) -> Callable[[Tensors], Tensors]:
    def convert(d: Tensors) -> Tensors:
        try:
            return {"w": change(d["w"])}
        except Exception:
            return {"w": d["w"] * 2}

    return convert


@pytest.mark.parametrize("error", [RuntimeError, IndexError, KeyError])
@pytest.mark.parametrize(
    ("operator", "change"),
    [
        (aten.flip.default, lambda w: w.flip(0)),
        (aten.slice.Tensor, lambda w: w[2:4]),
        (aten.fill.Scalar, lambda w: w.fill_(2)),
        (aten.t.default, lambda w: w.t().add_(1)),
    ],
)
def test_errors_of_our_own_are_not_hidden_by_a_converter(
    monkeypatch: pytest.MonkeyPatch, operator: Any, change: Change, error: type[Exception]
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise error("none of torch's")

    monkeypatch.setitem(HANDLERS, operator, broken)
    with pytest.raises(ConversionError, match="none of torch's"):
        check(tried(change))


def test_errors_that_torch_has_too_are_the_converter_s() -> None:
    for change in (
        lambda w: w.T.view(-1),
        lambda w: w[9],
        lambda w: w + torch.ones(5),
        lambda w: torch.cat([w, w[0]]),
        lambda w: w.reshape(7, 7),
        lambda w: torch.zeros(3).view(2),
        lambda w: w.clone().mul_(torch.ones(2, 8, 6)),
    ):
        check(tried(change))
    check(torch.inference_mode()(tried(lambda w: w.T.view(-1))))


def test_what_is_refused_in_a_thread_of_the_converter_is_refused() -> None:
    def scale(w: torch.Tensor) -> torch.Tensor:
        try:
            return w / float(w.abs().max())
        except Exception:
            return w * 2

    def convert(d: Tensors) -> Tensors:
        with ThreadPoolExecutor(2) as pool:
            return dict(zip(d, pool.map(scale, d.values()), strict=True))

    with pytest.raises(ConversionError, match="values"):
        check(convert)


def test_a_refusal_that_becomes_another_error_is_told() -> None:
    def convert(d: Tensors) -> Tensors:
        try:
            return {"w": d["w"] / d["w"].max().item()}
        except Exception as error:
            raise KeyError("w") from error

    with pytest.raises(ConversionError, match="values of the weights"):
        check(convert)


# A module's own loading.


class Hooked(nn.Module):
    """A module that applies ``change`` to its state dict before loading."""

    def __init__(self, change: Callable[[Any, nn.Module], None]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, 3))
        self.register_buffer("n", torch.tensor([2.0, 3.0]))
        self.register_load_state_dict_pre_hook(lambda module, state, *_: change(state, module))


def stored() -> Tensors:
    return {"w": torch.arange(12.0).view(4, 3), "n": torch.ones(2)}


def loads_as_torch(change: Callable[[Any, nn.Module], None]) -> None:
    expected = Hooked(change)
    expected.load_state_dict(stored())
    result = zerostart.load(stored(), lambda: Hooked(change), engine="fsdp2", zero_stage=0, progress=False)
    for name, want in expected.state_dict().items():
        assert torch.equal(result.state_dict()[name], want), name


def scaled_by_its_largest(state: Any, _: nn.Module) -> None:
    try:
        state["w"] = state["w"] / float(state["w"].abs().max())
    except Exception:
        return


def test_a_hook_of_a_module_cannot_hide_a_refusal() -> None:
    with pytest.raises(ConversionError, match="values of the weights"):
        loads_as_torch(scaled_by_its_largest)


def computed_from_the_module(state: Any, module: nn.Module) -> None:
    try:
        state["w"] = state["w"] + module.get_buffer("n").sum()
    except Exception:
        return


def test_a_hook_of_a_module_cannot_hide_that_it_needs_values_of_the_module() -> None:
    with pytest.raises(ConversionError, match="on a tensor of the module"):
        loads_as_torch(computed_from_the_module)
