"""The learning rate of each step, beside transformers' own."""

import typing

import pytest
import torch
from transformers import get_scheduler

from zerostart.training.config.configuration import Schedule, TrainingConfig
from zerostart.training.loop.session import learning_rate_schedule

RATE, STEPS = 1e-2, 12


def rates(make):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    scheduler = make(optimizer)
    found = []
    for _ in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        assert scheduler.get_last_lr() == found[-1:]
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize("schedule", typing.get_args(Schedule))
def test_warm_up_starts_above_zero_and_the_rest_is_as_transformers_has_it(schedule, warmup):
    config = TrainingConfig(steps=STEPS, learning_rate=RATE, schedule=schedule, warmup_steps=warmup)
    found = rates(lambda optimizer: learning_rate_schedule(optimizer, config))
    theirs = rates(lambda optimizer: get_scheduler(schedule, optimizer, warmup, STEPS))
    expected = theirs if schedule == "constant" else [RATE * (k + 1) / warmup for k in range(warmup)]
    assert found == pytest.approx(expected + theirs[len(expected) :])
    assert all(found), "a step at a rate of zero learns nothing"
