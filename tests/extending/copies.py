"""An engine of somebody else's that trains: every rank holds each parameter, and accelerate makes it DDP."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from zerostart.distributed.world import World, default_device
from zerostart.engines import DEVICE, Engine, Placements, Residence, Shard
from zerostart.geometry.layout import Layout, Parallelism, replicated


class Copies(Engine):
    """Whole parameters everywhere. The only thing that ``engine_config`` may say is ``{}``."""

    name = "copies"
    stages = (0,)
    replicates_parameters = True

    def placements(self, model: nn.Module, parallelism: Parallelism) -> Placements:
        layouts = {name: replicated(parameter.shape) for name, parameter in model.named_parameters()}
        homes = dict.fromkeys(layouts, DEVICE)
        return Placements(lambda name, rank: layouts[name], lambda name: None, lambda rank: 0, homes)

    def shard_maker(
        self, world: World, dtype: torch.dtype | None, parallelism: Parallelism, placements: Placements
    ) -> "Maker":
        return Maker(default_device())

    def shards_of(self, model: nn.Module, parallelism: Parallelism, rank: int) -> dict[str, Shard]:
        parameters = model.named_parameters(remove_duplicate=False)
        held = (rank, self.mesh.world_size)
        return {name: replace(shard(name, parameter), held=held) for name, parameter in parameters}


def shard(name: str, parameter: nn.Parameter) -> Shard:
    layout = replicated(parameter.shape)

    def at(rank: int) -> Layout:
        return layout

    return Shard(name, layout, parameter.detach().view(-1), at)


@dataclass
class Maker:
    """Puts memory in the place of each parameter."""

    device: torch.device

    def agree_on_residence(self, model: nn.Module, names: Sequence[str]) -> Residence | None:
        return None

    def shard(self, model: nn.Module, names: Sequence[str]) -> list[Shard]:
        new = {
            id(p): nn.Parameter(torch.empty_like(p, device=self.device), p.requires_grad)
            for p in model.parameters()
        }
        made = [shard(name, new[id(p)]) for name, p in model.named_parameters()]
        for module in model.modules():
            for leaf, old in module._parameters.items():
                if old is not None:
                    module._parameters[leaf] = new[id(old)]
        return made

    def finish(self, model: nn.Module) -> int:
        return 0
