"""Terminal output and ``metrics.jsonl`` of a run, and its learning rates."""

import json
import typing

import pytest
import torch
from transformers import get_scheduler

from zerostart.cli.terminal import duration
from zerostart.training.config.configuration import Schedule, TrainingConfig
from zerostart.training.loop.progress import Display
from zerostart.training.loop.session import learning_rate_schedule

GIGA = 2**30


def test_nonfinite_numbers_are_null(tmp_path, capsys):
    file = tmp_path / "metrics.jsonl"
    with Display(3, file, 1, active=True) as display:
        figures = {"learning_rate": 0.1, "items": 7, "seconds": 2.0, "peak_bytes": GIGA}
        display.step(1, {"loss": float("nan"), "gradient_norm": float("inf"), **figures})
        display.step(2, {"loss": 1.0, "gradient_norm": None, **figures})
        display.evaluation(2, float("-inf"))
    lines = [json.loads(line, parse_constant=pytest.fail) for line in file.read_text().splitlines()]
    assert [line.get("loss") for line in lines] == [None, 1.0, None]
    assert lines[0]["gradient_norm"] is lines[2]["held_out_loss"] is None
    printed = capsys.readouterr().out  # the terminal shows the value
    assert "step 1/3  loss nan  lr 1.0e-01  3.50 items/s" in printed


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        *((0, "0 s"), (39e-6, "< 1 ms"), (0.0394, "39 ms"), (0.9999, "1.0 s"), (9.96, "10 s")),
        *((119.4, "119 s"), (605, "10 min"), (7199, "120 min"), (7300, "2.0 h"), (1e7, "2,777.8 h")),
    ],
)
def test_durations(seconds, shown):
    assert duration(seconds) == shown


RATE, STEPS = 1e-2, 12


def list_rates(make):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    scheduler = make(optimizer)
    learning_rates = []
    for _ in range(STEPS):
        learning_rates.append(optimizer.param_groups[0]["lr"])
        assert scheduler.get_last_lr() == learning_rates[-1:]
        optimizer.step()
        scheduler.step()
    return learning_rates


@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize("schedule", typing.get_args(Schedule))
def test_schedules_equal_transformers_after_the_warm_up(schedule, warmup):
    config = TrainingConfig(steps=STEPS, learning_rate=RATE, schedule=schedule, warmup_steps=warmup)
    ours = list_rates(lambda optimizer: learning_rate_schedule(optimizer, config))
    theirs = list_rates(lambda optimizer: get_scheduler(schedule, optimizer, warmup, STEPS))
    expected = theirs if schedule == "constant" else [RATE * (k + 1) / warmup for k in range(warmup)]
    assert ours == pytest.approx(expected + theirs[len(expected) :])
    assert all(ours), "a step at a rate of zero learns nothing"
