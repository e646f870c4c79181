"""Parameters without dimensions on FSDP2: whole on every rank, frozen; to train one is refused by name."""

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
    """A factor of the model's own, one in each block, and a module that has nothing else."""

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


def frozen(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.requires_grad_(bool(parameter.dim()))
    return model


def load(source: Any) -> nn.Module:
    return zerostart.load(source, model=Scaled, engine="fsdp2", progress=False)


def in_shards(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    model = load(state)
    found: dict[str, Any] = {"held": dict(zerostart.full_tensors(model, rank=None))}
    whole = Scaled()
    whole.load_state_dict(state)
    found["digests"] = zerostart.digest(model) == zerostart.digest(whole)
    with torch.no_grad():
        found["forward"] = model(batch(0, 0))
    with pytest.raises(EngineError, match=r"factor, blocks\.0\.factor, .* gain\.weight.*freeze them"):
        model(batch(0, 0))
    frozen(model)(batch(dist.get_rank(), 0)).square().mean().backward()
    return found


@pytest.mark.slow
def test_parameters_without_dimensions() -> None:
    torch.manual_seed(0)
    model = Scaled()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        forward = model(batch(0, 0))
    for found in run_ranks(in_shards, 2, state):
        assert found["digests"]
        assert found["held"].keys() == state.keys()
        assert all(torch.equal(found["held"][name], tensor) for name, tensor in state.items())
        assert torch.equal(found["forward"], forward)
