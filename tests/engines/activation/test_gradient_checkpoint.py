"""Gradient checkpointing gives the numbers of the plain call, whatever goes in and comes out."""

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
    """Draws, has several outputs of several kinds, and takes tensors from wherever they stand."""
    y = F.dropout(x * scale, 0.5) + shift
    if extra is not None:
        y = y * extra["pair"][0].sin() + extra["pair"][1] * extra["none_of_it"]["deep"]
    return y, {"half": y.detach() / 2, "count": 3, "none": None}


def mixed(checkpoint: Run, offload: bool) -> list[Any]:
    torch.manual_seed(11)
    x, scale, inner = (torch.randn(5, 7).requires_grad_() for _ in range(3))
    frozen = torch.randn(7)
    extra = {"pair": (inner * 2, frozen), "none_of_it": {"deep": torch.randn(5, 1)}}
    y, others = checkpoint(block, x.exp(), scale=scale, extra=extra, shift=0.5, offload=offload)
    z, _ = checkpoint(block, y, scale=frozen, offload=offload)  # here keywords without a gradient
    (z.sum() + others["half"].sum()).backward()
    return [z, others["half"], others["count"], others["none"], x.grad, scale.grad, inner.grad, torch.rand(3)]


def frozen_inputs(checkpoint: Run, offload: bool) -> list[Any]:
    """Parameters inside get their gradients where no input needs one."""
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
    y = y.add_(1)  # what comes out may be written to
    y.square().sum().backward()
    return [y, x.grad, *(p.grad for p in layer.parameters())]


def feature_caches(checkpoint: Run, offload: bool) -> list[Any]:
    """The trap of causal video VAEs: a list that each layer reads, fills, and counts on in another list."""
    torch.manual_seed(14)
    weight = torch.randn(4, 4, requires_grad=True)
    cache: list[Any] = [None, None]
    made = []

    def layer(x: torch.Tensor, cache: list[Any], index: list[int], notes: dict[str, Any]) -> torch.Tensor:
        place = index[0]
        before = 0 if cache[place] is None else cache[place]
        cache[place] = x * 2
        notes.setdefault("places", []).append(place)
        index[0] += 1
        return (x + before) @ weight

    for x in torch.randn(3, 2, 4):  # three frames in turn
        index, notes = [0], {}
        x = checkpoint(layer, x, cache, index, notes, offload=offload)
        x = checkpoint(layer, x, cache=cache, index=index, notes=notes, offload=offload)
        made += [x, index[0], notes["places"]]
    sum(x.square().sum() for x in made[::3]).backward()
    return [*made, *cache, weight.grad]


CASES = [mixed, frozen_inputs, nested, feature_caches]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_values_and_gradients_are_those_of_the_plain_call(case: Run, offload: bool) -> None:
    assert unlike(case(plain, False), case(zerostart.gradient_checkpoint, offload)) == []


def unlike(expected: list[Any], found: list[Any]) -> list[int]:
    """Places that differ, by bits for tensors."""
    assert len(expected) == len(found)
    return [n for n, pair in enumerate(zip(expected, found, strict=True)) if not _same(*pair)]


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def test_nothing_is_kept_but_the_inputs() -> None:
    kept: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    x = torch.randn(10, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        zerostart.gradient_checkpoint(lambda x: x.exp().sin().exp().repeat(100).exp(), x)
    assert sum(kept) == 10


@pytest.mark.parametrize("offload", [False, True])
def test_what_a_function_writes_to_in_place_is_no_value_for_its_second_run(offload: bool) -> None:
    """torch says so of what it saves itself; where it is kept for it, nobody else does."""

    def scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return x.mul_(2).sin() * factor

    def gained(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return x.sin() * factor.add_(1)

    for function in (scaled, gained, torch.mul):
        x, factor = torch.randn(3, requires_grad=True).exp(), torch.randn(3)
        y = zerostart.gradient_checkpoint(function, x, factor, offload=offload)
        if function is torch.mul:
            factor.add_(1)  # afterwards, by whoever called it
        with pytest.raises(zerostart.errors.ConfigError if offload else RuntimeError, match=r"in.?place"):
            y.sum().backward()


def test_each_backward_of_a_retained_graph_begins_with_the_second_run() -> None:
    """An engine's hooks gather parameters for a forward, and must not do so inside a backward of them."""
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
