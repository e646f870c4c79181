"""Shards in this process's own memory, as placements say: without an engine, and without other ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import nn

from zerostart.engines.placements import DEVICE, Placements
from zerostart.engines.residence import Residence
from zerostart.engines.shard import Shard
from zerostart.transfer import Arena


class PlacedShards:
    """Makes the shards of ``rank``, uninitialised; what would be in files is in host memory."""

    def __init__(self, placements: Placements, rank: int, device: torch.device) -> None:
        self.device = device
        self._placements = placements
        self._rank = rank

    def agree_on_residence(self, model: nn.Module, names: Sequence[str]) -> Residence | None:
        """Nothing is whole."""
        return None

    def shard(self, model: nn.Module, names: Sequence[str]) -> list[Shard]:
        """The shards of ``names``; the model's parameters stay as they are."""
        parameters, placed = dict(model.named_parameters()), self._placements
        arenas = {False: Arena(torch.device("cpu")), True: Arena(self.device)}
        reserved = []
        for name in names:
            layout, dtype = placed.layout(name, self._rank), parameters[name].dtype
            arena = arenas[placed.homes[name] == DEVICE]
            reserved.append((name, layout, dtype, arena, arena.reserve(layout.numel, dtype)))
        return [
            Shard(
                name, layout, arena.take(place, layout.numel, dtype), functools.partial(placed.layout, name)
            )
            for name, layout, dtype, arena, place in reserved
        ]

    def finish(self, model: nn.Module) -> int:
        """Nothing is left to do."""
        return 0
