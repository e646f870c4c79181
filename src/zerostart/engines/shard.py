"""What an engine gives a load: local storages with their layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from zerostart.layout import Layout

__all__ = ["Engine", "Shard", "replace_everywhere"]


@dataclass(frozen=True)
class Shard:
    """A rank's share of the parameter ``name``: ``storage`` is 1-D, with ``layout.numel`` elements.

    ``at`` gives the layout of any rank; ranks that hold replicas have the same.
    """

    name: str
    layout: Layout
    storage: torch.Tensor
    at: Callable[[int], Layout]


class Engine(Protocol):
    """Makes empty sharded parameters that its engine will accept as its own."""

    device: torch.device

    def shard(self, model: nn.Module, names: Sequence[str]) -> list[Shard]:
        """Shard the meta parameters ``names`` (``named_parameters`` order, the same on all ranks)."""
        ...

    def finish(self, model: nn.Module) -> int:
        """Hand over after all storages are filled; returns the bytes that this rank got from others."""
        ...


def replace_everywhere(model: nn.Module, new: dict[int, nn.Parameter]) -> None:
    """Put new parameters in the place of old ones (by ``id``) in every module that holds them."""
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in new:
                module._parameters[leaf] = new[id(parameter)]
