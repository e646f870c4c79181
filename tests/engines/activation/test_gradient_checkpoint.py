"""Gradient checkpointing gives the numbers of the plain call for any inputs and outputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zerostart

Run = Callable[..., Any]


def plain(function: Run, *args: Any, offload: bool = False, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def block(x: torch.Tensor, *, scale: torch.Tensor, extra: Any = None, shift: float = 1.0) -> Any:
    """Use random numbers, nested tensor arguments and several kinds of outputs."""
    y = F.dropout(x * scale, 0.5) + shift
    if extra is not None:
        y = y * extra["pair"][0].sin() + extra["pair"][1] * extra["nested"]["deep"]
    return y, {"half": y.detach() / 2, "count": 3, "none": None}


def mixed(checkpoint: Run, offload: bool) -> list[Any]:
    torch.manual_seed(11)
    x, scale, inner = (torch.randn(5, 7).requires_grad_() for _ in range(3))
    frozen = torch.randn(7)
    extra = {"pair": (inner * 2, frozen), "nested": {"deep": torch.randn(5, 1)}}
    y, outputs = checkpoint(block, x.exp(), scale=scale, extra=extra, shift=0.5, offload=offload)
    z, _ = checkpoint(block, y, scale=frozen, offload=offload)  # no keyword needs a gradient here
    (z.sum() + outputs["half"].sum()).backward()
    return [
        z,
        outputs["half"],
        outputs["count"],
        outputs["none"],
        x.grad,
        scale.grad,
        inner.grad,
        torch.rand(3),
    ]


def frozen_inputs(checkpoint: Run, offload: bool) -> list[Any]:
    """Return gradients of parameters when no input needs one."""
    torch.manual_seed(12)
    layer, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 2)), torch.randn(3, 4)
    y = checkpoint(layer, x, offload=offload)
    y.square().sum().backward()
    return [y, *(p.grad for p in layer.parameters())]


def nested(checkpoint: Run, offload: bool) -> list[Any]:
    torch.manual_seed(13)
    layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)

    def inner(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(layer(x).tanh(), 0.4)

    def outer(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(inner, checkpoint(inner, x, offload=offload).sin(), offload=offload) * x

    y = checkpoint(outer, x, offload=offload)
    y = y.add_(1)  # an output may be changed in place
    y.square().sum().backward()
    return [y, x.grad, *(p.grad for p in layer.parameters())]


def feature_caches(checkpoint: Run, offload: bool) -> list[Any]:
    """Change list arguments in each layer, like the caches of causal video VAEs."""
    torch.manual_seed(14)
    weight = torch.randn(4, 4, requires_grad=True)
    cache: list[Any] = [None, None]
    results = []

    def layer(x: torch.Tensor, cache: list[Any], index: list[int], notes: dict[str, Any]) -> torch.Tensor:
        position = index[0]
        previous = 0 if cache[position] is None else cache[position]
        cache[position] = x * 2
        notes.setdefault("places", []).append(position)
        index[0] += 1
        return (x + previous) @ weight

    for x in torch.randn(3, 2, 4):  # three frames
        index, notes = [0], {}
        x = checkpoint(layer, x, cache, index, notes, offload=offload)
        x = checkpoint(layer, x, cache=cache, index=index, notes=notes, offload=offload)
        results += [x, index[0], notes["places"]]
    sum(x.square().sum() for x in results[::3]).backward()
    return [*results, *cache, weight.grad]


CASES = [mixed, frozen_inputs, nested, feature_caches]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_values_and_gradients_are_those_of_the_plain_call(case: Run, offload: bool) -> None:
    assert differing_places(case(plain, False), case(zerostart.gradient_checkpoint, offload)) == []


def differing_places(expected: list[Any], actual: list[Any]) -> list[int]:
    """Return the indices of values that are not equal, bit for bit for tensors."""
    assert len(expected) == len(actual)
    return [n for n, pair in enumerate(zip(expected, actual, strict=True)) if not _equal(*pair)]


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def test_only_the_inputs_are_saved_for_the_backward() -> None:
    saved_sizes: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved_sizes.append(tensor.numel())
        return tensor

    x = torch.randn(10, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        zerostart.gradient_checkpoint(lambda x: x.exp().sin().exp().repeat(100).exp(), x)
    assert sum(saved_sizes) == 10


@pytest.mark.parametrize("offload", [False, True])
def test_an_input_changed_in_place_is_an_error_in_the_backward(offload: bool) -> None:
    """torch checks the tensors that it saves; offloaded copies need a check by zerostart."""

    def scale_in_place(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return x.mul_(2).sin() * factor

    def change_factor(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return x.sin() * factor.add_(1)

    for function in (scale_in_place, change_factor, torch.mul):
        x, factor = torch.randn(3, requires_grad=True).exp(), torch.randn(3)
        y = zerostart.gradient_checkpoint(function, x, factor, offload=offload)
        if function is torch.mul:
            factor.add_(1)  # changed by the caller after the call
        with pytest.raises(zerostart.errors.ConfigError if offload else RuntimeError, match=r"in.?place"):
            y.sum().backward()


def test_each_backward_of_a_retained_graph_begins_with_the_second_run() -> None:
    """An engine's hooks must not gather parameters for a forward during their own backward."""
    order: list[str] = []

    class Last(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            order.append("forward")
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            order.append("backward")
            (x,) = ctx.saved_tensors
            return grad * x.cos()

    apply: Any = Last.apply
    x = torch.randn(3, requires_grad=True)
    y, z = zerostart.gradient_checkpoint(lambda x: (apply(x.exp()), x.tan()), x)
    for result in (y, z, y, y + z):
        order.clear()
        x.grad = None
        result.sum().backward(retain_graph=True)
        assert order == (["forward"] if result is z else ["forward", "backward"])
        expected = x.exp() * x.exp().cos() * (result is not z) + (1 + x.tan() ** 2) * (result is not y)
        assert torch.allclose(x.grad, expected)  # type: ignore[arg-type]
