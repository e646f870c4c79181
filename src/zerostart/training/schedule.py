"""The learning rate of each step: transformers' schedules, with a warm-up that starts above zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from zerostart.training.config import TrainingConfig

__all__ = ["learning_rate_schedule"]


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
