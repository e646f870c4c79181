"""Sections and their compositions against ``torch.chunk`` of real tensors, and DTensor's placements."""

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import _StridedShard

from tests.geometry.layout.test_layouts import placed
from tests.hypothesis_settings import count_examples
from zerostart.geometry.layout import (
    Layout,
    Ranges,
    Section,
    dimension_shard,
    entire,
    flat_partition,
    packed,
    replicated,
)
from zerostart.geometry.layout.layout import narrow_layout

shapes = st.lists(st.integers(1, 7), min_size=1, max_size=3)


def local(section: Section, numbers: torch.Tensor) -> torch.Tensor:
    """The local tensor that a section makes of ``numbers``."""
    out = torch.full(section.shape, -1, dtype=numbers.dtype)
    for box, place in section.boxes:
        into = tuple(slice(p, p + n) for p, n in zip(place, box.extent, strict=True))
        out[into] = numbers[tuple(slice(o, o + n) for o, n in zip(box.origin, box.extent, strict=True))]
    return out


def torch_chunk(tensor: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    chunks = tensor.chunk(size, dim)
    return chunks[rank] if rank < len(chunks) else tensor.narrow(dim, 0, 0)


def torch_packed(tensor: torch.Tensor, dim: int, parts: list[int], rank: int, size: int) -> torch.Tensor:
    return torch.cat([torch_chunk(part, dim, rank, size) for part in tensor.split(parts, dim)], dim)


@given(shapes, st.data(), st.integers(1, 5))
def test_a_chunk_is_torch_chunk(shape: list[int], data: st.DataObject, size: int) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    numbers = torch.arange(prod(shape)).view(shape)
    for rank in range(size):
        section = packed(shape, dim, (shape[dim],), rank, size)
        assert torch.equal(local(section, numbers), torch_chunk(numbers, dim, rank, size))


@given(shapes, st.data(), st.integers(1, 4))
def test_packed_parts_are_chunked_each_by_itself(shape: list[int], data: st.DataObject, size: int) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    first = data.draw(st.integers(0, shape[dim]))
    parts = [first, shape[dim] - first]
    numbers = torch.arange(prod(shape)).view(shape)
    for rank in range(size):
        want = torch_packed(numbers, dim, parts, rank, size)
        assert torch.equal(local(packed(shape, dim, parts, rank, size), numbers), want)


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4))
def test_a_packed_section_is_the_strided_shard_of_dtensor(each: int, parts: int, size: int) -> None:
    rows = each * parts * size
    numbers = torch.arange(rows * 2).view(rows, 2)
    pieces, _ = _StridedShard(0, split_factor=parts)._split_tensor(numbers, size, with_padding=False)
    for rank in range(size):
        assert torch.equal(
            local(packed((rows, 2), 0, (rows // parts,) * parts, rank, size), numbers), pieces[rank]
        )


@settings(max_examples=count_examples(70, 2000))
@given(shapes, st.data(), st.integers(1, 3), st.integers(1, 3))
def test_sections_and_layouts_nest(shape: list[int], data: st.DataObject, across: int, owners: int) -> None:
    """A mesh axis, then the engine's own cut: each applied to the real local tensor in turn."""
    numbers = torch.arange(prod(shape)).view(shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    packs = data.draw(st.integers(0, shape[dim]))
    flat = data.draw(st.booleans())
    parts = [min(packs, shape[dim]), max(0, shape[dim] - packs)]
    for rank in range(across):
        both = packed(shape, dim, parts, rank, across)
        own = torch_packed(numbers, dim, parts, rank, across)
        assert torch.equal(local(both, numbers), own)
        for owner in range(owners):
            layout: Layout
            layout = (
                flat_partition(both.shape, owner, owners)
                if flat
                else dimension_shard(both.shape, 0, owner, owners)
            )
            # The same layout, of the local tensor alone and of the whole parameter through the section.
            assert torch.equal(placed(both.holds(layout), numbers), placed(layout, own))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="do not add up"):
        packed((5, 2), 0, (2, 2), 0, 2)
    with pytest.raises(ValueError, match="does not fit a section"):
        entire((4, 2)).holds(flat_partition((4, 3), 0, 2))


def test_no_dimension() -> None:
    assert entire(()).holds(flat_partition((), 0, 1)).runs() == [(0, 1, 0)]


@given(st.data(), st.integers(1, 4))
def test_ranges_are_what_is_taken_in_their_order(data: st.DataObject, size: int) -> None:
    """Each row or column is dealt to a rank, in any order; all together they are everything."""
    shape = (data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6)))
    dim = data.draw(st.integers(0, 1))
    order = data.draw(st.permutations(range(shape[dim])))
    owner = [data.draw(st.integers(0, size - 1)) for _ in order]
    cut = Ranges(
        dim,
        tuple(
            tuple((i, i + 1) for i, r in zip(order, owner, strict=True) if r == rank) for rank in range(size)
        ),
    )
    numbers = torch.arange(shape[0] * shape[1]).view(shape)
    for rank in range(size):
        section = cut.section(shape, rank, size)
        taken = [i for i, r in zip(order, owner, strict=True) if r == rank]
        wanted = numbers.index_select(dim, torch.tensor(taken, dtype=torch.long))
        assert torch.equal(local(section, numbers), wanted)
        # Any run of the local tensor, as an optimizer has it, wherever its boxes are broken.
        whole = section.holds(replicated(section.shape))
        low = data.draw(st.integers(0, whole.numel))
        high = data.draw(st.integers(low, whole.numel))
        part = narrow_layout(whole, low, high)
        flat = torch.full((high - low,), -1, dtype=numbers.dtype)
        for first, count, place in part.runs():
            flat[place : place + count] = numbers.view(-1)[first : first + count]
        assert torch.equal(flat, wanted.reshape(-1)[low:high])
    with pytest.raises(ValueError, match="a shard specification for"):
        cut.section(shape, 0, size + 1)
