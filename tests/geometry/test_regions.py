"""Regions of strided copies address the same elements."""

from itertools import product
from math import prod

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hypothesis_settings import count_examples
from zerostart.geometry import (
    Copy,
    Region,
    regions,
    row_major_strides,
    split_region,
)


@st.composite
def copies(draw: st.DrawFn) -> tuple[tuple[int, ...], Copy]:
    """Draw a shape, and a copy inside it."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=4)))
    start = draw(st.integers(0, prod(shape) - 1))
    loops: list[tuple[int, int, int]] = []
    last_address, next_destination = start, 1
    for _ in range(draw(st.integers(0, 3))):
        size, stride = draw(st.integers(2, 8)), draw(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12, 24]))
        if last_address + (size - 1) * stride < prod(shape):
            last_address += (size - 1) * stride
            loops.append((size, stride, next_destination))
            next_destination *= size
    return shape, Copy("x", start, 0, tuple(sorted(loops, key=lambda loop: -loop[1])))


def addresses(start: int, to: int, loops: tuple[tuple[int, int, int], ...]) -> dict[int, int]:
    """Map destinations to source addresses."""
    sources: dict[int, int] = {}
    for index in product(*(range(size) for size, _, _ in loops)):
        destination = to + sum(i * loop[2] for i, loop in zip(index, loops, strict=True))
        sources[destination] = start + sum(i * loop[1] for i, loop in zip(index, loops, strict=True))
    return sources


def element_numbers(region: Region) -> dict[int, int]:
    """Map destinations to element numbers in the whole tensor."""
    shape = [size for parts in region.factors for size in parts]
    strides, box_strides = row_major_strides(shape), row_major_strides(region.box.extent)
    numbers = {}
    for destination, address in addresses(region.start, region.to, region.loops).items():
        index = [
            origin + address // stride % extent
            for origin, stride, extent in zip(region.box.origin, box_strides, region.box.extent, strict=True)
        ]
        assert all(i < size for i, size in zip(index, shape, strict=True)), "a box leaves the tensor"
        numbers[destination] = sum(i * stride for i, stride in zip(index, strides, strict=True))
    return numbers


@settings(max_examples=count_examples(200, 15000))
@given(copies(), st.integers(1, 20))
def test_regions_address_the_copys_elements(case: tuple[tuple[int, ...], Copy], limit: int) -> None:
    shape, copy = case
    sources: dict[int, int] = {}
    for region in regions(shape, copy):
        for part in split_region(region, limit):
            assert part.box.numel <= limit or not any(stride for _, stride, _ in part.loops)
            part_sources = element_numbers(part)
            assert not part_sources.keys() & sources.keys(), "two regions write one element"
            sources |= part_sources
    assert sources == addresses(copy.start, copy.to, copy.loops)


def test_transposed_run_has_a_minimal_region() -> None:
    # Four of sixteen columns of every row, column by column: the dimension is split by the stride.
    copy = Copy("x", 4, 0, ((6, 16, 1), (4, 1, 6)))
    (region,) = regions((96,), copy)
    assert region.box.numel == 24
