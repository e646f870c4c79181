"""Whether two checkpoint tensors hold the same values, found out together and in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

from zerostart.checkpoint.catalog import Catalog
from zerostart.distributed.world import World
from zerostart.geometry.layout import Layout, flat_partition
from zerostart.recipe import Recipe
from zerostart.transfer import Progress, execute
from zerostart.transfer.planning import Destination, join

#: Elements compared at a time.
STEP = 1 << 20


def equal_in(catalog: Catalog, world: World) -> Callable[[Recipe, Recipe], bool]:
    """A comparison of two recipes' values; collective, each rank reads and compares its own share."""

    def equal(a: Recipe, b: Recipe) -> bool:
        if a.target.shape != b.target.shape or a.target.dtype != b.target.dtype:
            return False
        total = prod(a.target.shape)
        steps = -(-total // STEP)
        same = all(
            _equal_part(catalog, a, b, flat_partition(a.target.shape, step, steps))
            for step in _share(catalog, world, steps)
        )
        return all(world.all_gather_object(same, "comparing tied weights"))

    return equal


def _share(catalog: Catalog, world: World, steps: int) -> range:
    """The steps of this rank: each has its part, of tensors in memory each rank that holds them."""
    readers = catalog.storage.readers(world.size)
    return range(readers.index(world.rank), steps, len(readers)) if world.rank in readers else range(0)


def _equal_part(catalog: Catalog, a: Recipe, b: Recipe, layout: Layout) -> bool:
    dtype = a.target.dtype
    plan = join(
        catalog,
        [(r, layout, Destination(r.target.name, layout.numel, layout.owned, dtype, True)) for r in (a, b)],
    )
    left, right = (torch.empty(layout.numel, dtype=dtype, device="cpu") for _ in range(2))
    execute(plan, [left, right], Progress(plan.read_bytes, shown=False))
    return torch.equal(left, right)
