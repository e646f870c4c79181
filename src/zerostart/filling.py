"""The memory that a load fills: shards of parameters, and buffers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from zerostart import models
from zerostart.engines import Shard
from zerostart.layout import Layout, replicated
from zerostart.models import Program, Settled
from zerostart.planning import Destination, Plan, Sharing
from zerostart.recipe import Recipe
from zerostart.serving import Moved, execute_together
from zerostart.transfer import Progress, Tuning
from zerostart.world import World

__all__ = ["Filling"]


@dataclass(frozen=True)
class Filling:
    """Where everything of a model goes on one rank, and where it comes from.

    ``shards`` are the parameters', in the engine's storage; ``buffers`` those that the checkpoint has.
    """

    settled: Settled
    shards: list[Shard]
    buffers: dict[str, tuple[Recipe, torch.Tensor]]

    @staticmethod
    def of(model: nn.Module, settled: Settled, shards: list[Shard], device: torch.device) -> Filling:
        """Move buffers to ``device``; those that the checkpoint fills get storage of their own there."""
        moved: dict[int, torch.Tensor] = {}
        placed: dict[str, tuple[Recipe, torch.Tensor]] = {}
        for name, buffer in list(model.named_buffers(remove_duplicate=False)):
            recipe = settled.buffers.get(name)
            if id(buffer) not in moved:
                moved[id(buffer)] = (
                    buffer.to(device)
                    if recipe is None
                    else torch.empty(buffer.shape, dtype=recipe.target.dtype, device=device)
                )
                if recipe is not None:
                    placed[name] = (recipe, moved[id(buffer)])
            models.replace_tensor(model, name, moved[id(buffer)])
        return Filling(settled, shards, placed)

    def wanted(self) -> list[tuple[Recipe, Layout, Destination]]:
        """Recipe, layout and destination of everything that is read, in the order of ``storages``."""
        wanted: list[tuple[Recipe, Layout, Destination]] = []
        for shard in self.shards:
            recipe = self.settled.parameters[shard.name]
            if isinstance(recipe, Recipe):
                at = _destination(shard.name, shard.storage, shard.layout.owned)
                wanted.append((recipe, shard.layout, at))
        for name, (recipe, buffer) in self.buffers.items():
            flat = buffer.view(-1)
            wanted.append((recipe, replicated(buffer.shape), _destination(name, flat, flat.numel())))
        return wanted

    def storages(self) -> list[torch.Tensor]:
        """Flat memory of everything that is read."""
        read = [s.storage for s in self.shards if isinstance(self.settled.parameters[s.name], Recipe)]
        return [*read, *(buffer.view(-1) for _, buffer in self.buffers.values())]

    def read(self, plan: Plan, tuning: Tuning, sharing: Sharing | None, shown: bool, world: World) -> Moved:
        """Bring what the checkpoint has, with a progress bar if ``shown``; collective."""
        return execute_together(
            plan, self.storages(), Progress(plan.read_bytes, shown), tuning, world, sharing
        )

    def initialise_missing(self, world: World) -> None:
        """Fill what the checkpoint lacks, from rank 0's random stream; collective.

        Every rank's shard has to come from one stream, and nothing says that the ranks were seeded alike.
        On rank 0 the generator goes on as after ``from_pretrained``, and so it does on ranks that were seeded
        like it.
        """
        parameters = self.settled.parameters
        programs = [(s, p) for s in self.shards if isinstance(p := parameters[s.name], Program)]
        if not programs:
            return
        own = torch.get_rng_state()
        shared = world.share(torch.get_rng_state, "sharing the random stream")
        torch.set_rng_state(shared)
        try:
            models.fill_missing([(p, s.layout, s.storage) for s, p in programs], self.settled.start)
        finally:
            if not torch.equal(own, shared):
                torch.set_rng_state(own)


def _destination(name: str, storage: torch.Tensor, owned: int) -> Destination:
    return Destination(name, storage.numel(), owned, storage.dtype, storage.device.type == "cpu")
