"""Modules that print the shape of a weight which is not there, as DiffSynth-Studio's of Wan-Animate do."""

import pytest
import torch
from torch import nn

import zerostart
from tests.ranks import run_ranks
from zerostart.upstream.deepspeed.zero3_start import keep_printable


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3, 2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(x, self.weight)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.weight.shape[1]}, {self.weight.shape[0]})"


def begun(kept: bool, trained: bool) -> str:
    """What deepspeed.initialize fails with, and what the model prints like afterwards."""
    import deepspeed

    built = nn.Sequential(Convolution())
    model = zerostart.load(None, model=built, engine="deepspeed", zero_stage=3, progress=False)
    if kept:
        keep_printable(model)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    config["zero_allow_untested_optimizer"] = True
    optimizer = torch.optim.AdamW(model.parameters()) if trained else None
    try:
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        engine(torch.zeros(1, 3, 2, 2))
        assert "__repr__" not in vars(type(model))
    except IndexError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("trained", [False, True])
def test_zero3_begins_with_what_does_not_print(trained: bool) -> None:
    assert "out of range" in run_ranks(begun, 1, False, trained)[0]
    assert run_ranks(begun, 1, True, trained) == [""]
