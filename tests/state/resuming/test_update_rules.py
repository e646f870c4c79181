"""Optimizer state is restored only for the same rule."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, Adamax, AdamW, NAdam, Optimizer, RAdam

import zerostart
from zerostart.errors import CheckpointError

OptimizerFactory = Callable[..., Optimizer]


class DerivedAdamW(AdamW):
    """A script's subclass that keeps torch's step."""


class SignDescent(AdamW):
    """A different rule with the same settings."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


def train(make: OptimizerFactory, count: int) -> tuple[nn.Module, Optimizer, Iterator[float]]:
    """Return a model, its optimizer, and an iterator of losses."""
    torch.manual_seed(1)
    model = nn.Linear(4, 3)
    optimizer = make(model.parameters(), lr=1e-2)

    def losses() -> Iterator[float]:
        while True:
            optimizer.zero_grad()
            loss = model(torch.arange(4.0).to(model.weight.dtype)).square().sum()
            loss.backward()
            optimizer.step()
            yield loss.item()

    iterator = losses()
    for _ in range(count):
        next(iterator)
    return model, optimizer, iterator


SAME_RULES: dict[str, tuple[OptimizerFactory, OptimizerFactory]] = {
    "derived class": (AdamW, DerivedAdamW),
    "base class, with options": (partial(DerivedAdamW, amsgrad=True, maximize=True), AdamW),
    "same rule by a setting": (partial(Adam, weight_decay=0.1, decoupled_weight_decay=True), AdamW),
}


@pytest.mark.parametrize("name", SAME_RULES)
def test_same_rule_resumes(tmp_path: Path, name: str) -> None:
    saved, other = SAME_RULES[name]
    model, optimizer, expected = train(saved, 2)
    zerostart.save_state(tmp_path / "state", model, optimizer)
    model, optimizer, losses = train(other, 3)
    zerostart.load_state(tmp_path / "state", model, optimizer)
    assert [next(losses) for _ in range(3)] == [next(expected) for _ in range(3)]


OTHER_RULES: dict[str, tuple[OptimizerFactory, OptimizerFactory, str]] = {
    "Adamax": (
        AdamW,
        Adamax,
        "uses the update rule of AdamW, and torch.optim.adamax.Adamax uses that of Adamax",
    ),
    "RAdam": (AdamW, RAdam, "the update rule of AdamW, .* uses that of RAdam"),
    "from RAdam": (RAdam, AdamW, "the update rule of RAdam, .* uses that of AdamW"),
    "NAdam": (Adam, NAdam, "the update rule of Adam, .* uses that of NAdam"),
    "overridden step": (AdamW, SignDescent, "the update rule of AdamW, .* uses that of SignDescent"),
    "with an option": (partial(AdamW, maximize=True), RAdam, "the update rule of AdamW"),
}


@pytest.mark.parametrize("name", OTHER_RULES)
def test_other_rules_are_refused(tmp_path: Path, name: str) -> None:
    saved, other, message = OTHER_RULES[name]
    model, optimizer, _ = train(saved, 2)
    zerostart.save_state(tmp_path / "state", model, optimizer)
    weights = [parameter.clone() for parameter in model.parameters()]
    model, optimizer, _ = train(other, 1)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(CheckpointError, match=rf"{message}.* load only the weights \(zerostart\.load of"):
        zerostart.load_state(tmp_path / "state", model, optimizer)
    assert all(map(torch.equal, model.parameters(), before))
    zerostart.load_state(tmp_path / "state", model)  # without the optimizer, weights are loaded
    assert all(map(torch.equal, model.parameters(), weights))


def test_unsaved_optimizer_state_is_removed(tmp_path: Path) -> None:
    """Like torch's own loading."""
    model, optimizer, expected = train(AdamW, 2)
    zerostart.save_state(tmp_path / "state", model, optimizer)
    model, optimizer, losses = train(partial(AdamW, amsgrad=True), 3)
    zerostart.load_state(tmp_path / "state", model, optimizer)
    assert all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for state in optimizer.state.values())
    assert next(losses) == next(expected)
