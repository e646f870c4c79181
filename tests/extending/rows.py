"""An engine of another package that shards rows, and cannot train."""

import functools
from collections.abc import Sequence

import torch
from torch import nn

from zerostart.distributed.world import World
from zerostart.engines import DEVICE, Engine, Placements, Residence, Shard, register_engine
from zerostart.geometry.layout import Layout, Parallelism, dimension_shard


@register_engine
class Rows(Engine):
    """Engine that shards every parameter by rows."""

    name = "rows"

    def placements(self, model: nn.Module, parallelism: Parallelism) -> Placements:
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        size = self.mesh.world_size

        def layout(name: str, rank: int) -> Layout:
            return dimension_shard(shapes[name], 0, rank, size)

        return Placements(layout, lambda name: None, lambda rank: rank, dict.fromkeys(shapes, DEVICE))

    def shard_maker(
        self, world: World, dtype: torch.dtype | None, parallelism: Parallelism, placements: Placements
    ) -> "RowMaker":
        return RowMaker(world.rank, placements)

    def shards_of(self, model: nn.Module, parallelism: Parallelism, rank: int) -> dict[str, Shard]:
        shards = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            layout_at = functools.partial(
                dimension_shard,
                parameter.whole,
                0,
                world_size=self.mesh.world_size,  # type: ignore[attr-defined]
            )
            shards[name] = Shard(
                parameter.original_name, layout_at(rank), parameter.detach().view(-1), layout_at
            )  # type: ignore[attr-defined]
        return shards


class RowMaker:
    """Replaces each parameter by the rank's rows."""

    device = torch.device("cpu")

    def __init__(self, rank: int, placements: Placements) -> None:
        self._rank, self._placements = rank, placements

    def agree_on_residence(self, model: nn.Module, names: Sequence[str]) -> Residence | None:
        return None

    def shard(self, model: nn.Module, names: Sequence[str]) -> list[Shard]:
        shards, new_parameters = [], {}
        for name, old in model.named_parameters():
            layout = self._placements.layout(name, self._rank)
            rows = nn.Parameter(torch.empty(layout.numel, dtype=old.dtype))
            rows.whole, rows.original_name = tuple(old.shape), name  # type: ignore[attr-defined]
            layout_at = functools.partial(self._placements.layout, name)
            shards.append(Shard(name, layout, rows.data, layout_at))
            new_parameters[id(old)] = rows
        for module in model.modules():
            for leaf, old in module._parameters.items():
                if old is not None:
                    module._parameters[leaf] = new_parameters[id(old)]
        return shards

    def finish(self, model: nn.Module) -> int:
        return 0
