"""What a torch optimizer steps, and the parameters that it stands for, wherever an engine keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Member", "Stepped", "plain_steps"]


@dataclass(frozen=True)
class Member:
    """A parameter that a stepped tensor has elements of: ``count`` of them, from its element ``at`` on.

    They are what this rank holds of the parameter itself, or, with ``first``, the elements from that one on
    of the row-major order of all that this rank holds of it, of which there may be none.
    """

    parameter: torch.Tensor
    at: int
    count: int
    first: int | None = None


@dataclass(frozen=True)
class Stepped:
    """One tensor that ``optimizer`` steps, with its state under it, in its param group number ``group``."""

    optimizer: torch.optim.Optimizer
    tensor: torch.Tensor
    group: int
    members: tuple[Member, ...]

    @property
    def state(self) -> dict[str, Any]:
        """What the optimizer keeps for the tensor now; nothing before the first step, with most."""
        found: dict[str, Any] = self.optimizer.state.get(self.tensor, {})
        return found

    @property
    def is_parameter(self) -> bool:
        """Whether it is the one parameter itself, and no copy of what a rank has of some."""
        return len(self.members) == 1 and self.members[0].parameter is self.tensor


def plain_steps(optimizer: torch.optim.Optimizer) -> list[Stepped]:
    """What an optimizer steps that was given a model's own parameters."""
    return [
        Stepped(optimizer, parameter, number, (Member(parameter, 0, parameter.numel()),))
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    ]
