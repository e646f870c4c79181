"""The memory that a load fills: shards of parameters, and buffers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from zerostart import models
from zerostart.distributed.world import World
from zerostart.engines import Shard
from zerostart.geometry.layout import Layout, replicated
from zerostart.models import Origins, Program
from zerostart.recipe import Recipe
from zerostart.transfer import Progress, Tuning
from zerostart.transfer.collective import ReadStrategy, TransferStats, execute_together
from zerostart.transfer.planning import Destination, Plan


@dataclass(frozen=True)
class Destinations:
    """Where everything of a model goes on one rank, and where it comes from."""

    origins: Origins
    #: The parameters', in the engine's storage.
    shards: list[Shard]
    #: Those that the checkpoint has: recipe and tensor, by name.
    buffers: dict[str, tuple[Recipe, torch.Tensor]]
    #: Buffers that are drawn with the parameters.
    drawn: list[tuple[Program, torch.Tensor]]

    @staticmethod
    def of(model: nn.Module, origins: Origins, shards: list[Shard], device: torch.device) -> Destinations:
        """Move buffers to ``device``; those that the checkpoint fills get storage of their own there."""
        # By identity: a buffer that is registered under several names stays one.
        moved: dict[int, torch.Tensor] = {}
        placed: dict[str, tuple[Recipe, torch.Tensor]] = {}
        for name, buffer in list(model.named_buffers(remove_duplicate=False)):
            recipe = origins.buffers.get(name)
            if id(buffer) not in moved:
                moved[id(buffer)] = (
                    buffer.to(device)
                    if recipe is None
                    else torch.empty(buffer.shape, dtype=recipe.target.dtype, device=device)
                )
                if recipe is not None:
                    placed[name] = (recipe, moved[id(buffer)])
            models.replace_tensor(model, name, moved[id(buffer)])
        # Looked up again: the tensors under the names are those on ``device`` now.
        named = dict(model.named_buffers())
        drawn = [(program, named[name].view(-1)) for name, program in origins.drawn.items()]
        return Destinations(origins, shards, placed, drawn)

    def wanted(self) -> list[tuple[Recipe, Layout, Destination]]:
        """Recipe, layout and destination of everything that is read, in the order of ``storages``."""
        wanted: list[tuple[Recipe, Layout, Destination]] = []
        # One order for plans and memory: a plan knows a destination by its place in this list.
        for shard in self.shards:
            recipe = self.origins.parameters[shard.name]
            if isinstance(recipe, Recipe):
                at = _destination(shard.name, shard.storage, shard.layout.owned)
                wanted.append((recipe, shard.layout, at))
        for name, (recipe, buffer) in self.buffers.items():
            flat = buffer.view(-1)
            wanted.append((recipe, replicated(buffer.shape), _destination(name, flat, flat.numel())))
        return wanted

    def storages(self) -> list[torch.Tensor]:
        """Flat memory of everything that is read."""
        # In the order of ``wanted``, whose places a plan counts by.
        read = [s.storage for s in self.shards if isinstance(self.origins.parameters[s.name], Recipe)]
        return [*read, *(buffer.view(-1) for _, buffer in self.buffers.values())]

    def read(
        self, plan: Plan, tuning: Tuning, strategy: ReadStrategy | None, shown: bool, world: World
    ) -> TransferStats:
        """Bring what the checkpoint has, with a progress bar if ``shown``; collective."""
        return execute_together(
            plan, self.storages(), Progress(plan.read_bytes, shown), tuning, world, strategy
        )

    def initialise_missing(self, world: World) -> None:
        """Fill what the checkpoint lacks, from rank 0's random stream; collective.

        Every rank's shard has to come from one stream, and nothing says that the ranks were seeded alike.
        On rank 0 the generator goes on as after ``from_pretrained``, and so it does on ranks that were seeded
        like it.
        """
        parameters = self.origins.parameters
        programs = [
            (p, s.layout, s.storage) for s in self.shards if isinstance(p := parameters[s.name], Program)
        ]
        # Their order is of no matter: programs know the place of their draws in the stream.
        programs += [(p, replicated((buffer.numel(),)), buffer) for p, buffer in self.drawn]
        if not programs:
            return
        # Collective before anything is drawn; ranks without a program of their own take part too, since
        # programs are the same on all.
        own = torch.get_rng_state()
        shared = world.broadcast_object(torch.get_rng_state, "sharing the random stream")
        torch.set_rng_state(shared)
        try:
            models.fill_missing(programs, self.origins.start)
        finally:
            # A rank that was seeded otherwise than rank 0 goes on with its own stream, as if nothing had been
            # drawn.
            if not torch.equal(own, shared):
                torch.set_rng_state(own)


def _destination(name: str, storage: torch.Tensor, owned: int) -> Destination:
    return Destination(name, storage.numel(), owned, storage.dtype, storage.device.type == "cpu")
