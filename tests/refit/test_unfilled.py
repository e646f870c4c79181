"""An engine that a model does not fill, or not only once: what a push of it does."""

from typing import Any

import pytest
import torch
from torch import nn

import zerostart
from zerostart.errors import ZerostartError

SIZE = (6, 4)


class _Engine(nn.Module):
    """Takes the weight twice and the bias never; nothing that a checkpoint has is for ``scale``."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Parameter(torch.zeros(2 * SIZE[0], SIZE[1]))
        # Tied: another parameter in the same memory.
        self.tied = nn.Parameter(self.twice.data)
        self.scale = nn.Parameter(torch.ones(3))

    def load_weights(self, pairs: Any) -> None:
        for name, tensor in pairs:
            if name == "weight":
                for half in range(2):
                    self.twice.data.narrow(0, half * SIZE[0], SIZE[0]).copy_(tensor)


def _model() -> nn.Module:
    weights = {"weight": torch.rand(SIZE), "bias": torch.rand(SIZE[0])}
    return zerostart.load(weights, lambda: nn.Linear(SIZE[1], SIZE[0]), engine="fsdp2", progress=False)


def _has(engine: _Engine, model: nn.Module) -> bool:
    weight = model.weight.detach().to_local()  # type: ignore[operator, union-attr]
    return torch.equal(engine.twice.detach(), torch.cat([weight, weight]))


def test_what_would_stay_as_it_is_is_refused_and_what_nobody_takes_is_told() -> None:
    model, engine = _model(), _Engine()
    with pytest.raises(ZerostartError, match=r"fills scale with nothing .* strict=False"):
        zerostart.refit(model, engine, timeout=20).push()
    assert not engine.twice.detach().any()
    with zerostart.refit(model, engine, timeout=20, strict=False) as refitter:
        for _ in range(3):
            with torch.no_grad():
                next(model.parameters()).mul_(-0.5)
            report: Any = refitter.push()
            assert _has(engine, model)
            assert report.untaken == ("bias",)
            assert "taken by nobody: bias" in str(report)
    assert torch.equal(engine.scale.detach(), torch.ones(3))
