"""The optimizer that DiffSynth's scripts are told to use (``--customized_optimizer``)."""

import os
from collections.abc import Iterable
from typing import Any

import torch


def AdamW(parameters: Iterable[torch.nn.Parameter], **settings: Any) -> torch.optim.Optimizer:
    """Set a seed of this rank, which the scripts do not, before the first batch is drawn."""
    torch.manual_seed(1000 + int(os.environ.get("RANK", "0")))
    return torch.optim.AdamW(parameters, **settings)
