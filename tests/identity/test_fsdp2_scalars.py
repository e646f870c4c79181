"""Parameters without dimensions on FSDP2: whole on every rank, frozen; to train one is refused by name."""

from pathlib import Path
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


def trained_alone(model: nn.Module, ranks: int) -> dict[str, torch.Tensor]:
    """The state after two steps over the batches of all ranks, in plain torch."""
    optimizer = torch.optim.AdamW(frozen(model).parameters(), lr=0.1)
    for step in range(2):
        losses = [model(batch(rank, step)).square().mean() for rank in range(ranks)]
        torch.stack(losses).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def stepped(model: nn.Module, steps: range, optimizer: Any) -> None:
    for step in steps:
        model(batch(dist.get_rank(), step)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def load(source: Any) -> nn.Module:
    return zerostart.load(source, model=Scaled, engine="fsdp2", progress=False)


def in_shards(state: dict[str, torch.Tensor], folder: Path) -> dict[str, Any]:
    model = load(state)
    found: dict[str, Any] = {"held": dict(zerostart.full_tensors(model, rank=None))}
    whole = Scaled()
    whole.load_state_dict(state)
    found["digests"] = zerostart.digest(model) == zerostart.digest(whole)
    with torch.no_grad():
        found["forward"] = model(batch(0, 0))
    with pytest.raises(EngineError, match=r"factor, blocks\.0\.factor, .* gain\.weight.*freeze them"):
        model(batch(0, 0))
    optimizer = torch.optim.AdamW(frozen(model).parameters(), lr=0.1)
    stepped(model, range(1), optimizer)
    zerostart.save_state(folder / "state", model, optimizer)
    again = load(state)
    optimizer = torch.optim.AdamW(frozen(again).parameters(), lr=0.1)
    zerostart.load_state(folder / "state", again, optimizer)
    stepped(again, range(1, 2), optimizer)
    zerostart.save(again, folder / "saved")
    return found


@pytest.mark.slow
def test_parameters_without_dimensions(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    torch.manual_seed(0)
    model = Scaled()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        forward = model(batch(0, 0))
    for found in run_ranks(in_shards, 2, state, tmp_path):
        assert found["digests"]
        assert found["held"].keys() == state.keys()
        assert all(torch.equal(found["held"][name], tensor) for name, tensor in state.items())
        assert torch.equal(found["forward"], forward)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    torch.testing.assert_close(saved, trained_alone(model, 2), rtol=1e-5, atol=1e-6)
