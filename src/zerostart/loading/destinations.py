"""Memory that a load fills: shards of parameters, and buffers."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    """Memory of one rank for a model's tensors, with the origin of each."""

    origins: Origins
    #: Shards of the parameters, in the engine's storage.
    shards: list[Shard]
    #: Recipe and tensor of each buffer that the checkpoint has, by name.
    buffers: dict[str, tuple[Recipe, torch.Tensor]]
    #: Buffers whose values come from the random stream of the parameters.
    random_buffers: list[tuple[Program, torch.Tensor]]

    @staticmethod
    def of(model: nn.Module, origins: Origins, shards: list[Shard], device: torch.device) -> Destinations:
        """Move buffers to ``device``, and allocate those that the checkpoint fills."""
        # By identity: a buffer registered under several names stays one tensor.
        by_id: dict[int, torch.Tensor] = {}
        buffers: dict[str, tuple[Recipe, torch.Tensor]] = {}
        for name, buffer in list(model.named_buffers(remove_duplicate=False)):
            recipe = origins.buffers.get(name)
            if id(buffer) not in by_id:
                by_id[id(buffer)] = (
                    buffer.to(device)
                    if recipe is None
                    else torch.empty(buffer.shape, dtype=recipe.target.dtype, device=device)
                )
                if recipe is not None:
                    buffers[name] = (recipe, by_id[id(buffer)])
            models.replace_tensor(model, name, by_id[id(buffer)])
        named = dict(model.named_buffers())
        random_buffers = [(program, named[name].view(-1)) for name, program in origins.random_buffers.items()]
        return Destinations(origins, shards, buffers, random_buffers)

    def requests(self) -> list[tuple[Recipe, Layout, Destination]]:
        """Return recipe, layout and destination of every tensor to read, in order of ``storages``."""
        requests: list[tuple[Recipe, Layout, Destination]] = []
        for shard in self.shards:
            recipe = self.origins.parameters[shard.name]
            if isinstance(recipe, Recipe):
                requests.append(read_request(shard.name, recipe, shard.layout, shard.storage))
        for name, (recipe, buffer) in self.buffers.items():
            requests.append(read_request(name, recipe, replicated(buffer.shape), buffer.view(-1)))
        return requests

    def storages(self) -> list[torch.Tensor]:
        """Return the flat memory of every tensor to read; plans refer to it by its index."""
        read = [s.storage for s in self.shards if isinstance(self.origins.parameters[s.name], Recipe)]
        return [*read, *(buffer.view(-1) for _, buffer in self.buffers.values())]

    def read(
        self, plan: Plan, tuning: Tuning, strategy: ReadStrategy | None, shown: bool, world: World
    ) -> TransferStats:
        """Read the checkpoint's tensors, with a progress bar if ``shown``; collective."""
        return execute_together(
            plan, self.storages(), Progress(plan.read_bytes, shown), tuning, world, strategy
        )

    def initialise_missing(self, world: World) -> None:
        """Initialise missing tensors from rank 0's random stream; collective.

        Ranks may have different seeds, but their shards must come from one stream. Afterwards the generator
        of rank 0, and of ranks with the same seed, is in the state that ``from_pretrained`` leaves.
        """
        parameters = self.origins.parameters
        programs = [
            (p, s.layout, s.storage) for s in self.shards if isinstance(p := parameters[s.name], Program)
        ]
        programs += [(p, replicated((buffer.numel(),)), buffer) for p, buffer in self.random_buffers]
        if not programs:
            return
        own = torch.get_rng_state()
        shared = world.broadcast_object(torch.get_rng_state, "sharing the random stream")
        torch.set_rng_state(shared)
        try:
            models.fill_missing(programs, self.origins.start)
        finally:
            # A rank with another seed continues its own stream.
            if not torch.equal(own, shared):
                torch.set_rng_state(own)


def read_request(
    name: str, recipe: Recipe, layout: Layout, storage: torch.Tensor
) -> tuple[Recipe, Layout, Destination]:
    """Describe a read of ``layout`` into the 1-D ``storage``, in its dtype, for a plan."""
    recipe = replace(recipe, target=replace(recipe.target, dtype=storage.dtype))
    on_host = storage.device.type == "cpu"
    return recipe, layout, Destination(name, storage.numel(), layout.owned, storage.dtype, on_host)
