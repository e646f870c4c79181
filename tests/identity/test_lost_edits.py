"""Edits of ZeRO-3 parameters that would be lost: DeepSpeed's own check reports them for loaded models."""

import pytest
import torch
from torch import nn

import zerostart
from tests.ranks import run_ranks


def edit() -> None:
    import deepspeed

    torch.manual_seed(0)
    model = zerostart.load(None, model=nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), progress=False)
    weight = model[1].weight
    before = dict(zerostart.full_tensors(model, rank=None))["1.weight"].clone()
    with (
        pytest.raises(RuntimeError, match="Detected in-place modification of ZeRO-3 parameters"),
        deepspeed.zero.GatheredParameters(weight),
    ):
        nn.init.zeros_(weight)
    with deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
        nn.init.ones_(weight)
    after = dict(zerostart.full_tensors(model, rank=None))["1.weight"]
    assert torch.equal(after, torch.ones_like(before))


@pytest.mark.slow
def test_edits_without_a_modifier_are_errors() -> None:
    run_ranks(edit, 2)
