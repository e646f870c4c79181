"""FSDP2 keeps scalar parameters whole and frozen."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerostart
from tests.ranks import run_ranks
from zerostart.errors import EngineError

WIDTH = 6


class Scaled(nn.Module):
    """Model with scalar parameters in several modules."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.count = nn.Parameter(torch.tensor(7), requires_grad=False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.gain = Gain()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.gain(x) * self.factor


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.factor = nn.Parameter(torch.tensor(-2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x).tanh() * self.factor


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def freeze_scalars(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.requires_grad_(bool(parameter.dim()))
    return model


def load(source: Any) -> nn.Module:
    return zerostart.load(source, model=Scaled, engine="fsdp2", progress=False)


def load_in_shards(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    model = load(state)
    results: dict[str, Any] = {"tensors": dict(zerostart.full_tensors(model, rank=None))}
    unsharded = Scaled()
    unsharded.load_state_dict(state)
    results["digests"] = zerostart.digest(model) == zerostart.digest(unsharded)
    with torch.no_grad():
        results["forward"] = model(batch(0, 0))
    with pytest.raises(EngineError, match=r"factor, blocks\.0\.factor, .* gain\.weight.*freeze them"):
        model(batch(0, 0))
    freeze_scalars(model)(batch(dist.get_rank(), 0)).square().mean().backward()
    return results


@pytest.mark.slow
def test_scalar_parameters_are_loaded_and_refused_in_training() -> None:
    torch.manual_seed(0)
    model = Scaled()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        forward = model(batch(0, 0))
    for results in run_ranks(load_in_shards, 2, state):
        assert results["digests"]
        assert results["tensors"].keys() == state.keys()
        assert all(torch.equal(results["tensors"][name], tensor) for name, tensor in state.items())
        assert torch.equal(results["forward"], forward)
