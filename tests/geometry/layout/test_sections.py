"""Sections and their compositions equal ``torch.chunk`` and DTensor's placements."""

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import _StridedShard

from tests.geometry.layout.test_layouts import fill_storage
from tests.hypothesis_settings import count_examples
from zerostart.geometry.layout import (
    Layout,
    Ranges,
    Section,
    dimension_shard,
    flat_partition,
    packed_section,
    replicated,
    whole_section,
)
from zerostart.geometry.layout.layout import narrow_layout

shapes = st.lists(st.integers(1, 7), min_size=1, max_size=3)


def local_tensor(section: Section, numbers: torch.Tensor) -> torch.Tensor:
    """Return the section's local tensor of ``numbers``."""
    out = torch.full(section.shape, -1, dtype=numbers.dtype)
    for box, start in section.boxes:
        target = tuple(slice(p, p + n) for p, n in zip(start, box.extent, strict=True))
        out[target] = numbers[tuple(slice(o, o + n) for o, n in zip(box.origin, box.extent, strict=True))]
    return out


def torch_chunk(tensor: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    chunks = tensor.chunk(size, dim)
    return chunks[rank] if rank < len(chunks) else tensor.narrow(dim, 0, 0)


def torch_packed(tensor: torch.Tensor, dim: int, parts: list[int], rank: int, size: int) -> torch.Tensor:
    return torch.cat([torch_chunk(part, dim, rank, size) for part in tensor.split(parts, dim)], dim)


@given(shapes, st.data(), st.integers(1, 5))
def test_chunk_equals_torch_chunk(shape: list[int], data: st.DataObject, size: int) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    numbers = torch.arange(prod(shape)).view(shape)
    for rank in range(size):
        section = packed_section(shape, dim, (shape[dim],), rank, size)
        assert torch.equal(local_tensor(section, numbers), torch_chunk(numbers, dim, rank, size))


@given(shapes, st.data(), st.integers(1, 4))
def test_packed_parts_are_chunked_separately(shape: list[int], data: st.DataObject, size: int) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    first = data.draw(st.integers(0, shape[dim]))
    parts = [first, shape[dim] - first]
    numbers = torch.arange(prod(shape)).view(shape)
    for rank in range(size):
        expected = torch_packed(numbers, dim, parts, rank, size)
        assert torch.equal(local_tensor(packed_section(shape, dim, parts, rank, size), numbers), expected)


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4))
def test_packed_section_equals_dtensors_strided_shard(rows_per_part: int, parts: int, size: int) -> None:
    rows = rows_per_part * parts * size
    numbers = torch.arange(rows * 2).view(rows, 2)
    pieces, _ = _StridedShard(0, split_factor=parts)._split_tensor(numbers, size, with_padding=False)
    for rank in range(size):
        assert torch.equal(
            local_tensor(packed_section((rows, 2), 0, (rows // parts,) * parts, rank, size), numbers),
            pieces[rank],
        )


@settings(max_examples=count_examples(70, 2000))
@given(shapes, st.data(), st.integers(1, 3), st.integers(1, 3))
def test_sections_and_layouts_nest(shape: list[int], data: st.DataObject, size: int, owners: int) -> None:
    """Apply a mesh axis, then the engine's layout."""
    numbers = torch.arange(prod(shape)).view(shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    first = data.draw(st.integers(0, shape[dim]))
    flat = data.draw(st.booleans())
    parts = [min(first, shape[dim]), max(0, shape[dim] - first)]
    for rank in range(size):
        section = packed_section(shape, dim, parts, rank, size)
        local = torch_packed(numbers, dim, parts, rank, size)
        assert torch.equal(local_tensor(section, numbers), local)
        for owner in range(owners):
            layout: Layout
            layout = (
                flat_partition(section.shape, owner, owners)
                if flat
                else dimension_shard(section.shape, 0, owner, owners)
            )
            # The layout of the local tensor equals that of the whole parameter through the section.
            assert torch.equal(fill_storage(section.expand(layout), numbers), fill_storage(layout, local))


def test_mismatched_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="do not add up"):
        packed_section((5, 2), 0, (2, 2), 0, 2)
    with pytest.raises(ValueError, match="does not fit a section"):
        whole_section((4, 2)).expand(flat_partition((4, 3), 0, 2))


def test_scalars() -> None:
    assert whole_section(()).expand(flat_partition((), 0, 1)).runs() == [(0, 1, 0)]


@given(st.data(), st.integers(1, 4))
def test_ranges_select_in_their_order(data: st.DataObject, size: int) -> None:
    """Deal rows or columns to ranks in any order."""
    shape = (data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6)))
    dim = data.draw(st.integers(0, 1))
    order = data.draw(st.permutations(range(shape[dim])))
    owner = [data.draw(st.integers(0, size - 1)) for _ in order]
    ranges = Ranges(
        dim,
        tuple(
            tuple((i, i + 1) for i, r in zip(order, owner, strict=True) if r == rank) for rank in range(size)
        ),
    )
    numbers = torch.arange(shape[0] * shape[1]).view(shape)
    for rank in range(size):
        section = ranges.section(shape, rank, size)
        indices = [i for i, r in zip(order, owner, strict=True) if r == rank]
        expected = numbers.index_select(dim, torch.tensor(indices, dtype=torch.long))
        assert torch.equal(local_tensor(section, numbers), expected)
        # Any run of the local tensor, as optimizers have them.
        whole = section.expand(replicated(section.shape))
        low = data.draw(st.integers(0, whole.numel))
        high = data.draw(st.integers(low, whole.numel))
        part = narrow_layout(whole, low, high)
        flat = torch.full((high - low,), -1, dtype=numbers.dtype)
        for first, count, start in part.runs():
            flat[start : start + count] = numbers.view(-1)[first : first + count]
        assert torch.equal(flat, expected.reshape(-1)[low:high])
    with pytest.raises(ValueError, match="a shard specification for"):
        ranges.section(shape, 0, size + 1)
