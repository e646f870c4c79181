"""Optimizers that step each element separately, so that shards can be stepped."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

_elementwise: set[type[Optimizer]] = {
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
}


#: Classes of packages that need not be installed, by package and name.
_NAMED = {
    *(("deepspeed", name) for name in ("FusedAdam", "DeepSpeedCPUAdam", "DeepSpeedCPULion", "FusedLion")),
    ("lion_pytorch", "Lion"),
}


def is_elementwise(kind: type) -> bool:
    """Return True if optimizers of this class are known to step elements separately."""
    return kind in _elementwise or (kind.__module__.partition(".")[0], kind.__name__) in _NAMED


def register_elementwise_optimizer(kind: type[Optimizer]) -> None:
    """Declare that optimizers of this class step each element separately."""
    _elementwise.add(kind)
