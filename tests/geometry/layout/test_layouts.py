"""Layouts equal the engines' own definitions."""

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from zerostart.geometry.layout import Layout, dimension_shard, flat_partition, replicated

shapes = st.lists(st.integers(1, 7), min_size=0, max_size=3)


def fill_storage(layout: Layout, numbers: torch.Tensor) -> torch.Tensor:
    """Fill a rank's storage from element numbers; -1 is padding."""
    out = torch.full((layout.numel,), -1)
    flat = numbers.reshape(-1)
    for first, count, to in layout.runs():
        out[to : to + count] = flat[first : first + count]
    return out


@given(shapes, st.integers(1, 6))
def test_flat_partition_cuts_the_padded_order_into_equal_runs(shape: list[int], world: int) -> None:
    numbers = torch.arange(prod(shape)).view(shape)
    size = -(-numbers.numel() // world)
    padded = torch.cat([numbers.reshape(-1), torch.full((size * world - numbers.numel(),), -1)])
    for rank, expected in enumerate(padded.split(size)):
        layout = flat_partition(shape, rank, world)
        assert torch.equal(fill_storage(layout, numbers), expected)
        assert layout.owned == int((expected >= 0).sum())


@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.integers(1, 6))
def test_dimension_shard_is_torch_chunk(shape: list[int], world: int) -> None:
    numbers = torch.arange(prod(shape)).view(shape)
    chunks = list(numbers.chunk(world))
    chunks += [numbers[:0]] * (world - len(chunks))
    for rank, expected in enumerate(chunks):
        layout = dimension_shard(shape, 0, rank, world)
        assert torch.equal(fill_storage(layout, numbers)[: layout.owned], expected.reshape(-1))
        assert layout.owned == expected.numel()
        assert layout.numel == chunks[0].numel()


@given(shapes)
def test_replicated_holds_everything(shape: list[int]) -> None:
    numbers = torch.arange(prod(shape)).view(shape)
    assert torch.equal(fill_storage(replicated(shape), numbers), numbers.reshape(-1))
