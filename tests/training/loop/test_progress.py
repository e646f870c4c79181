"""What a run shows at a terminal, and what it writes down."""

import json
import re
import typing
from pathlib import Path

import pytest
import torch
from transformers import get_scheduler

from zerostart.errors import WriteError
from zerostart.training.config.configuration import Schedule, TrainingConfig
from zerostart.training.loop import progress
from zerostart.training.loop.progress import Display, Metrics
from zerostart.training.loop.session import learning_rate_schedule
from zerostart.training.loop.terminal import duration

GIGA = 2**30


@pytest.fixture
def clock(monkeypatch):
    """The seconds that the display sees, as a list of one number."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_the_live_line_fits(width, clock, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    report = "  missing (2): " + ", ".join(["some.module.of.a.model.weight"] * 4)
    with Display(10_000, tmp_path / "metrics.jsonl", 1, active=True) as display:
        display.say(report)
        display.start()
        for step in (1, 2):
            clock[0] += 0.7
            display.step(Metrics(step, 10.748, 1.0, 3e-4, 10**5, 98 * GIGA))
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out).replace("\r", "\n")
    lines = [line.rstrip() for line in shown.splitlines()]
    assert "…" not in shown
    assert all(len(line) <= width for line in lines), shown
    assert any(line.startswith("2/10000 ") and "loss 10.7480  lr 3.0e-04" in line for line in lines)
    assert any("105.2 GB" in line for line in lines) == (width >= 80)
    words = [word.rstrip(",") for line in lines for word in line.split() if word.startswith("some")]
    assert words == ["some.module.of.a.model.weight"] * 4


def test_a_full_disk_ends_no_run_that_goes_on_without_checkpoints(capsys, caplog):
    """Linux has a device that is always full. Without the option the first figures end the run."""
    full = Path("/dev/full")
    for skips in (True, False):
        ended = False
        try:
            with Display(3, full, 1, active=True, skip_unwritable=skips) as display:
                display.start()
                for step in (1, 2, 3):
                    display.step(Metrics(step, 1.0, 1.0, 0.1, 7, GIGA))
        except (WriteError, OSError):
            ended = True
        assert ended != skips
    assert [record.message for record in caplog.records] == [
        "/dev/full: the metrics of the run cannot be written: No space left on device; the run goes on, and "
        "tries again"
    ]


def test_numbers_that_are_not_finite_are_null(tmp_path, capsys):
    file = tmp_path / "metrics.jsonl"
    with Display(3, file, 1, active=True) as display:
        display.start()
        display.step(Metrics(1, float("nan"), float("inf"), 0.1, 7, GIGA))
        display.step(Metrics(2, None, None, 0.1, 0, GIGA))
        display.evaluation(2, float("-inf"))
    lines = [json.loads(line, parse_constant=pytest.fail) for line in file.read_text().splitlines()]
    assert [line.get("loss") for line in lines] == [None, None, None]
    assert lines[0]["gradient_norm"] is lines[2]["held_out_loss"] is None
    shown = capsys.readouterr().out  # a person is told what it was
    assert "loss nan" in shown
    assert "loss -  lr" in shown


def test_what_lies_between_two_steps_is_no_part_of_either(clock, tmp_path, capsys):
    """The seconds of a step, and from them those that are left: no evaluation, no start of the session."""
    file = tmp_path / "metrics.jsonl"
    with Display(3, file, 1, active=True) as display:
        for step in (1, 2):
            clock[0] += 100  # an evaluation
            display.start()
            clock[0] += 2
            display.step(Metrics(step, 1.0, 1.0, 0.1, 10, GIGA))
    assert re.findall("([0-9.]+) s left", capsys.readouterr().out) == ["4.0", "2.0"]
    assert [json.loads(line)["seconds"] for line in file.read_text().splitlines()] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        *((0, "0 s"), (39e-6, "< 1 ms"), (0.0394, "39 ms"), (0.9999, "1.0 s"), (9.96, "10 s")),
        *((119.4, "119 s"), (605, "10 min"), (7199, "120 min"), (7300, "2.0 h"), (1e7, "2,777.8 h")),
    ],
)
def test_durations(seconds, shown):
    assert duration(seconds) == shown


# The learning rate of each step, beside transformers' own.


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
