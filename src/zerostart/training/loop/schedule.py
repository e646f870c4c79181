"""The learning rate of each step: transformers' schedules, with a warm-up that starts above zero."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from zerostart.training.config.train import TrainingConfig


def learning_rate_schedule(optimizer: Optimizer, train: TrainingConfig) -> LambdaLR:
    """``train.schedule`` over ``train.steps`` steps of ``optimizer``, to be stepped after each of them.

    Step ``k`` (from 0) of ``train.warmup_steps`` = ``W`` has the rate ``learning_rate * (k + 1) / W``: the
    last of them has the full rate, and none has zero, which would be a batch for nothing. From step ``W``
    on, and without warm-up, the rates are those of ``transformers.get_scheduler``, whose own warm-up is
    ``k / W``.
    """
    from transformers import get_scheduler

    made: Any = get_scheduler(train.schedule, optimizer, train.warmup_steps, train.steps)
    theirs: Callable[[int], float] = made.lr_lambdas[0]
    warmup = 0 if train.schedule == "constant" else train.warmup_steps  # "constant" takes no notice of it
    return LambdaLR(optimizer, lambda step: (step + 1) / warmup if step < warmup else theirs(step))


def reschedule(schedule: LambdaLR, state: Mapping[str, Any], rate: float) -> None:
    """Have ``schedule`` go on from the step of ``state`` with another ``learning_rate``, by its own rules."""
    rates = [rate * rule(state["last_epoch"]) for rule in schedule.lr_lambdas]
    schedule.load_state_dict({**state, "base_lrs": [rate] * len(rates), "_last_lr": rates})
    for group, now in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["initial_lr"], group["lr"] = rate, now
