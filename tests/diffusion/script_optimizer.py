"""Optimizer for DiffSynth's scripts (``--customized_optimizer``)."""

import os
from collections.abc import Iterable
from typing import Any

import torch


def AdamW(parameters: Iterable[torch.nn.Parameter], **settings: Any) -> torch.optim.Optimizer:
    """Seed this rank before its first batch, which the scripts do not."""
    torch.manual_seed(1000 + int(os.environ.get("RANK", "0")))
    return torch.optim.AdamW(parameters, **settings)
