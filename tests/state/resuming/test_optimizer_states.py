"""Optimizers that keep more than AdamW does: it comes back, or the save says by name what it would lose."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostart
from tests.ranks import run_ranks
from zerostart.errors import ConfigError


class Counting(torch.optim.SGD):
    """Numbers of its own, in its state dict and under no parameter of its state."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, lr=lr, momentum=0.9)
        self.ramp = 1.0
        self.history = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "ramp": self.ramp, "history": self.history}


class Lookahead(torch.optim.Optimizer):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4, bias=False))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, width: int = 8) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        loss = model(torch.randn(4, width, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=1e-2, relative_step=False, beta1=0.9)


WHOLE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch's Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "transformers' Adafactor": adafactor,
    "Muon": lambda p: torch.optim.Muon([x for x in p if x.dim() == 2], lr=1e-2),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_model_goes_on(name: str, tmp_path: Path) -> None:
    model = net()
    optimizer = WHOLE[name](model.parameters())
    trained(model, optimizer, range(2))
    zerostart.save_state(tmp_path / "state", model, optimizer)
    wanted = trained(model, optimizer, range(2, 5))
    other = net()
    resumed = WHOLE[name](other.parameters())
    zerostart.load_state(tmp_path / "state", other, resumed)
    assert trained(other, resumed, range(2, 5)) == wanted
    zerostart.load_state(tmp_path / "state", model, optimizer)  # of one that has gone on
    assert trained(model, optimizer, range(2, 5)) == wanted
    zerostart.verify(tmp_path / "state")


def test_an_optimizer_around_another_is_refused(tmp_path: Path) -> None:
    model = net()
    optimizer = Lookahead(torch.optim.AdamW(model.parameters()))
    with pytest.raises(ConfigError, match="Lookahead wraps another one, a AdamW, in its attribute optimizer"):
        zerostart.save_state(tmp_path / "state", model, optimizer)
    assert not (tmp_path / "state").exists()


def test_values_of_its_own_are_refused(tmp_path: Path) -> None:
    model = net()
    with pytest.raises(ConfigError, match=r"Counting has additional values .*ramp, history"):
        zerostart.save_state(tmp_path / "state", model, Counting(model.parameters()))


def test_a_state_of_no_parameter_is_refused(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[torch.ones(2)]["step"] = 3
    with pytest.raises(ConfigError, match="in none of its groups"):
        zerostart.save_state(tmp_path / "state", model, optimizer)


def test_an_averaged_model_counts_on(tmp_path: Path) -> None:
    models = [torch.optim.swa_utils.AveragedModel(net()) for _ in range(2)]
    for _ in range(3):
        models[0].update_parameters(net())
    zerostart.save_state(tmp_path / "state", models[0])
    zerostart.load_state(tmp_path / "state", models[1])
    assert models[1].n_averaged == 3


def muons(folder: Path, saves: bool) -> list[float]:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(net())
    optimizer = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-2)
    if saves:
        trained(model, optimizer, range(2))
        zerostart.save_state(folder, model, optimizer)
    else:
        zerostart.load_state(folder, model, optimizer)
    return trained(model, optimizer, range(2, 5))


@pytest.mark.slow
def test_muon_goes_on_with_other_ranks(tmp_path: Path) -> None:
    wanted = run_ranks(muons, 2, tmp_path / "state", True)[0]
    assert run_ranks(muons, 2, tmp_path / "state", False)[0] == wanted
    assert run_ranks(muons, 1, tmp_path / "state", False)[0] == pytest.approx(wanted, rel=1e-3)
