"""Run the conformance tests on an engine of another package, and on zerostart's."""

from typing import Any

import pytest
import torch
from torch import nn

import tests.extending.rows  # noqa: F401  # registers itself
from zerostart.testing import EngineConformance


def train_by_deepspeed(model: nn.Module, stage: int) -> tuple[Any, None, Any]:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step() -> None:
        engine.backward(engine(torch.arange(4)).square().mean())
        engine.step()

    return engine, None, step


class TestRows(EngineConformance):
    engine = "rows"
    imports = ("tests.extending.rows",)


@pytest.mark.slow
class TestDeepSpeed(EngineConformance):
    engine = "deepspeed"
    training = staticmethod(train_by_deepspeed)
    stages = (0, 1, 2, 3)


@pytest.mark.slow
class TestFSDP2(EngineConformance):
    engine = "fsdp2"
    stages = (0, 1, 2, 3)
