"""Load traced tensors in shards without processes, and compare them."""

from collections.abc import Mapping

import torch
from torch import nn

from zerostart.checkpoint.memory import memory_catalog
from zerostart.geometry.layout import dimension_shard, flat_partition
from zerostart.recipe import Recipe, SymbolicTensor, Target
from zerostart.transfer import Progress, execute
from zerostart.transfer.planning import Destination, Plan, PlanOptions, join

Tensors = dict[str, torch.Tensor]


def symbols_of(source: Tensors) -> dict[str, SymbolicTensor]:
    """Return the symbolic tensors of a checkpoint."""
    return {name: SymbolicTensor.of(name, tuple(t.shape), t.dtype) for name, t in source.items()}


def module_with(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a module on meta that expects ``tensors``."""
    result = nn.Module()
    for name, tensor in tensors.items():
        result.register_buffer(name, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
    return result


def recipe_of(name: str, symbolic: SymbolicTensor) -> Recipe:
    """Return the recipe of a traced tensor."""
    return Recipe(Target(name, tuple(symbolic.shape), symbolic.dtype), symbolic.pieces)


def compare(
    result: Mapping[str, Recipe], expected: Tensors, source: Tensors, world: int, chunk: int
) -> list[Plan]:
    """Load traced tensors in shards of ``world`` ranks, compare each, and return the plans."""
    catalog = memory_catalog(source)
    actual = []
    for name, want in expected.items():
        recipe, shape = result[name], tuple(want.shape)
        assert (recipe.target.shape, recipe.target.dtype) == (shape, want.dtype)
        for rank in range(world):
            for layout in (
                flat_partition(shape, rank, world),
                *([dimension_shard(shape, 0, rank, world)] if shape else []),
            ):
                destination = Destination(name, layout.numel, layout.owned, want.dtype, direct=True)
                plan = join(catalog, [(recipe, layout, destination)], PlanOptions(chunk_size=chunk))
                storage = torch.full((layout.numel,), 7).to(want.dtype)
                assert execute(plan, [storage], Progress(0, shown=False), threads=2) == plan.read_bytes
                right = torch.zeros(layout.numel, dtype=want.dtype)
                for first, count, to in layout.runs():
                    right[to : to + count] = want.reshape(-1)[first : first + count]
                assert torch.equal(storage.view(torch.uint8), right.view(torch.uint8)), (name, rank)
                actual.append(plan)
    return actual
