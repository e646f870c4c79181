"""Optimizers that do not call torch's constructor."""

from pathlib import Path

import pytest
import torch
from torch import nn

import zerostart


class Lookahead(torch.optim.Optimizer):
    """Wrapper that copies the optimizer's fields."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state
        self.defaults = optimizer.defaults


def test_optimizer_without_its_constructor_is_named(tmp_path: Path) -> None:
    weights = nn.Linear(3, 2).state_dict()
    model = zerostart.load(weights, lambda: nn.Linear(3, 2), engine="fsdp2", progress=False)
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(zerostart.ZerostartError, match=r"^Lookahead does not call torch\.optim\.Optimizer"):
        zerostart.save_state(tmp_path / "state", model, optimizer)
