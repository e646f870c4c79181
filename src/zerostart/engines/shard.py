"""What an engine gives a load: local storages with their layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from zerostart.geometry.layout import Layout


@dataclass(frozen=True)
class Shard:
    """A rank's share of the parameter ``name``: ``storage`` is 1-D, with ``layout.numel`` elements.

    ``at`` gives the layout of any rank; ranks that hold replicas have the same. ``held`` is this rank's place
    among the ranks that hold this very share, and how many they are: what is to be done once, such as writing
    it, they divide among themselves. ``local`` is the layout of the tensor that the rank has in the end, of
    which the share is what it reads; None: of the share itself. ``stepped`` is like ``held``, of a run of the
    share that the rank's optimizer updates.
    """

    name: str
    layout: Layout
    storage: torch.Tensor
    at: Callable[[int], Layout]
    held: tuple[int, int] = (0, 1)
    local: Layout | None = None
    stepped: tuple[int, int] = (0, 1)


def replace_everywhere(model: nn.Module, new: dict[int, nn.Parameter]) -> None:
    """Put new parameters in the place of old ones (by ``id``) in every module that holds them."""
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in new:
                module._parameters[leaf] = new[id(parameter)]
