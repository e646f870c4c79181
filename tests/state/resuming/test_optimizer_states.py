"""Restore or refuse optimizers with more state than AdamW."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostart
from tests.ranks import run_ranks
from zerostart.errors import ConfigError


class SGDWithHistory(torch.optim.SGD):
    """Optimizer with additional values in its state dict."""

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


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4, bias=False))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, width: int = 8) -> list[float]:
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


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch's Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "transformers' Adafactor": adafactor,
    "Muon": lambda p: torch.optim.Muon([x for x in p if x.dim() == 2], lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_unsharded_model_resumes(name: str, tmp_path: Path) -> None:
    model = make_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, range(2))
    zerostart.save_state(tmp_path / "state", model, optimizer)
    expected = train(model, optimizer, range(2, 5))
    resumed_model = make_model()
    resumed = OPTIMIZERS[name](resumed_model.parameters())
    zerostart.load_state(tmp_path / "state", resumed_model, resumed)
    assert train(resumed_model, resumed, range(2, 5)) == expected
    zerostart.load_state(tmp_path / "state", model, optimizer)  # into the model that was trained further
    assert train(model, optimizer, range(2, 5)) == expected
    zerostart.verify(tmp_path / "state")


def test_optimizer_around_another_is_refused(tmp_path: Path) -> None:
    model = make_model()
    optimizer = Lookahead(torch.optim.AdamW(model.parameters()))
    with pytest.raises(ConfigError, match="Lookahead wraps another one, a AdamW, in its attribute optimizer"):
        zerostart.save_state(tmp_path / "state", model, optimizer)
    assert not (tmp_path / "state").exists()


def test_additional_values_are_refused(tmp_path: Path) -> None:
    model = make_model()
    with pytest.raises(ConfigError, match=r"SGDWithHistory has additional values .*ramp, history"):
        zerostart.save_state(tmp_path / "state", model, SGDWithHistory(model.parameters()))


def test_state_without_a_parameter_is_refused(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[torch.ones(2)]["step"] = 3
    with pytest.raises(ConfigError, match="in none of its groups"):
        zerostart.save_state(tmp_path / "state", model, optimizer)


def test_averaged_model_keeps_its_count(tmp_path: Path) -> None:
    models = [torch.optim.swa_utils.AveragedModel(make_model()) for _ in range(2)]
    for _ in range(3):
        models[0].update_parameters(make_model())
    zerostart.save_state(tmp_path / "state", models[0])
    zerostart.load_state(tmp_path / "state", models[1])
    assert models[1].n_averaged == 3


def train_with_muon(folder: Path, save: bool) -> list[float]:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(make_model())
    optimizer = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-2)
    if save:
        train(model, optimizer, range(2))
        zerostart.save_state(folder, model, optimizer)
    else:
        zerostart.load_state(folder, model, optimizer)
    return train(model, optimizer, range(2, 5))


@pytest.mark.slow
def test_muon_resumes_on_other_ranks(tmp_path: Path) -> None:
    expected = run_ranks(train_with_muon, 2, tmp_path / "state", True)[0]
    assert run_ranks(train_with_muon, 2, tmp_path / "state", False)[0] == expected
    assert run_ranks(train_with_muon, 1, tmp_path / "state", False)[0] == pytest.approx(expected, rel=1e-3)
