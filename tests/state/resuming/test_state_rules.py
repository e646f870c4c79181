"""Which optimizer goes on with the state of another: one that steps by the same rule, and no other."""

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

Made = Callable[..., Optimizer]


class Derived(AdamW):
    """A script's, which steps as torch's does."""


class Signs(AdamW):
    """Another rule over the same numbers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


def run(make: Made, count: int) -> tuple[nn.Module, Optimizer, Iterator[float]]:
    """A model, its optimizer after ``count`` steps, and the losses of all that follow."""
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

    found = losses()
    for _ in range(count):
        next(found)
    return model, optimizer, found


SAME: dict[str, tuple[Made, Made]] = {
    "a class that derives from it": (AdamW, Derived),
    "and back, with a variant": (partial(Derived, amsgrad=True, maximize=True), AdamW),
    "the same rule as a setting": (partial(Adam, weight_decay=0.1, decoupled_weight_decay=True), AdamW),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_rule_goes_on(tmp_path: Path, name: str) -> None:
    saved, other = SAME[name]
    model, optimizer, wanted = run(saved, 2)
    zerostart.save_state(tmp_path / "state", model, optimizer)
    model, optimizer, found = run(other, 3)
    zerostart.load_state(tmp_path / "state", model, optimizer)
    assert [next(found) for _ in range(3)] == [next(wanted) for _ in range(3)]


OTHER: dict[str, tuple[Made, Made, str]] = {
    "Adamax": (
        AdamW,
        Adamax,
        "uses the update rule of AdamW, and torch.optim.adamax.Adamax uses that of Adamax",
    ),
    "RAdam": (AdamW, RAdam, "the update rule of AdamW, .* uses that of RAdam"),
    "from RAdam": (RAdam, AdamW, "the update rule of RAdam, .* uses that of AdamW"),
    "NAdam": (Adam, NAdam, "the update rule of Adam, .* uses that of NAdam"),
    "a step of its own": (AdamW, Signs, "the update rule of AdamW, .* uses that of Signs"),
    "a variant": (partial(AdamW, maximize=True), RAdam, "the update rule of AdamW"),
}


@pytest.mark.parametrize("name", OTHER)
def test_another_rule_is_refused_by_name(tmp_path: Path, name: str) -> None:
    saved, other, told = OTHER[name]
    model, optimizer, _ = run(saved, 2)
    zerostart.save_state(tmp_path / "state", model, optimizer)
    weights = [parameter.clone() for parameter in model.parameters()]
    model, optimizer, _ = run(other, 1)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(CheckpointError, match=rf"{told}.* load only the weights \(zerostart\.load of"):
        zerostart.load_state(tmp_path / "state", model, optimizer)
    assert all(map(torch.equal, model.parameters(), before))
    zerostart.load_state(tmp_path / "state", model)  # and so they are, as the optimizer is left out
    assert all(map(torch.equal, model.parameters(), weights))


def test_a_state_that_was_not_saved_goes(tmp_path: Path) -> None:
    """As with torch's own loading: what the running optimizer kept besides belongs to another run."""
    model, optimizer, wanted = run(AdamW, 2)
    zerostart.save_state(tmp_path / "state", model, optimizer)
    model, optimizer, found = run(partial(AdamW, amsgrad=True), 3)
    zerostart.load_state(tmp_path / "state", model, optimizer)
    assert all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for state in optimizer.state.values())
    assert next(found) == next(wanted)
