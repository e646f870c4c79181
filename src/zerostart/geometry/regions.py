"""Strided runs of a row-major order as boxes of a tensor.

A copy addresses a tensor by element number. A computed tensor is needed as boxes. Dimensions are
split where a stride requires it (``n`` into ``n / q`` and ``q``), so that a box has few elements that the
copy does not need.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zerostart.geometry.copies import Box, Copy, Loop
from zerostart.geometry.digits import row_major_strides


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a tensor with split dimensions, and a copy out of it."""

    #: For each dimension of the tensor the sizes that it is split into.
    factors: tuple[tuple[int, ...], ...]
    #: Box of the split shape.
    box: Box
    #: Address of the first destination.
    to: int
    #: (size, stride in the box's row-major order, destination stride).
    loops: tuple[Loop, ...]
    #: Element of the box's own row-major order at which the copy begins.
    start: int = 0


def regions(shape: Sequence[int], copy: Copy) -> Iterator[Region]:
    """Yield the regions of a tensor that ``copy`` reads; their destinations are disjoint."""
    factors: list[tuple[int, ...]] = [(size,) for size in shape]
    for _, stride, _ in copy.loops:
        if stride:
            # 1. Split dimensions until each stride of the copy steps along one of them.
            _refine(factors, stride)
    split = [size for parts in factors for size in parts]
    # 2. Boxes of the split shape, cut where a loop carries into the next dimension.
    yield from _boxes(tuple(factors), split, copy.start, copy.to, list(copy.loops))


def split_region(region: Region, limit: int) -> Iterator[Region]:
    """Split ``region`` into parts whose boxes have at most ``limit`` elements."""
    moving = [number for number, loop in enumerate(region.loops) if loop[1]]
    if region.box.numel <= limit or not moving:
        yield region
        return
    inside = row_major_strides(region.box.extent)
    # Cut along the largest stride: the parts stay runs of whole rows.
    number = max(moving, key=lambda n: region.loops[n][1])
    size, stride, _ = region.loops[number]
    dim, step = _dimension(region.box.extent, inside, stride)
    # The steps of other loops beyond the last step of this one: each part keeps them.
    reach = region.box.extent[dim] - 1 - (size - 1) * step
    steps_per_part = max(1, (limit // inside[dim] - reach - 1) // step + 1)
    for part in _split_loop(region, number, steps_per_part):
        yield from split_region(part, limit)


def _split_loop(region: Region, number: int, steps_per_part: int) -> Iterator[Region]:
    """Split ``region`` into parts of ``steps_per_part`` steps of its loop ``number``."""
    size, _, place = region.loops[number]
    old = row_major_strides(region.box.extent)
    steps = [_dimension(region.box.extent, old, loop[1]) if loop[1] else (0, 0) for loop in region.loops]
    dim, step = steps[number]
    for first in range(0, size, steps_per_part):
        count = min(steps_per_part, size - first)
        origin, extent = list(region.box.origin), list(region.box.extent)
        origin[dim] += first * step
        # The box shrinks by the missing steps; steps of other loops in this dimension remain.
        extent[dim] -= (size - count) * step
        new = row_major_strides(extent)
        loops = [(loop[0], new[d] * n, loop[2]) for loop, (d, n) in zip(region.loops, steps, strict=True)]
        loops[number : number + 1] = [(count, new[dim] * step, place)] if count > 1 else []
        box = Box(tuple(origin), tuple(extent))
        yield Region(region.factors, box, region.to + first * place, tuple(loops))


def _refine(factors: list[tuple[int, ...]], stride: int) -> None:
    below = 1
    for number in range(len(factors) - 1, -1, -1):
        parts = factors[number]
        for position in range(len(parts) - 1, -1, -1):
            size = parts[position]
            # The stride steps inside this part: with the part split, it steps over one index of the upper
            # one.
            if below < stride < below * size and stride % below == 0:
                step = stride // below
                if size % step == 0:
                    factors[number] = (*parts[:position], size // step, step, *parts[position + 1 :])
                return
            below *= size


def _boxes(
    factors: tuple[tuple[int, ...], ...], shape: Sequence[int], start: int, to: int, loops: list[Loop]
) -> Iterator[Region]:
    strides = row_major_strides(shape)
    origin = _coordinates(start, shape, strides)
    extent = [1] * len(shape)
    steps: list[tuple[int, int]] = []
    for number, (size, stride, _) in enumerate(loops):
        if stride == 0:
            steps.append((0, 0))
            continue
        dim, step = _dimension(shape, strides, stride)
        # The loop carries if it and the other loops have more steps than this dimension has room for.
        if size > -(-(shape[dim] - origin[dim] - (extent[dim] - 1)) // step):
            for first, part in _split_at_rows(loops[number], shape[dim], step, origin[dim], extent[dim] - 1):
                inner_loops = [*loops[:number], *part, *loops[number + 1 :]]
                _, source, place = loops[number]
                yield from _boxes(factors, shape, start + first * source, to + first * place, inner_loops)
            return
        extent[dim] += (size - 1) * step
        steps.append((dim, step))
    inside = row_major_strides(extent)
    local = tuple(
        (size, inside[dim] * step if step else 0, place)
        for (size, _, place), (dim, step) in zip(loops, steps, strict=True)
    )
    yield Region(factors, Box(tuple(origin), tuple(extent)), to, local)


def _split_at_rows(loop: Loop, rows: int, step: int, at: int, inner: int) -> Iterator[tuple[int, list[Loop]]]:
    """Cut a loop that exceeds its dimension of ``rows``: yield ``(first step, loops)``.

    ``at`` is its start in the dimension, and ``inner`` the extent of other loops there.
    """
    size, stride, place = loop
    first = 0
    while first < size:
        row = (at + first * step) % rows
        remaining = size - first
        steps_per_row = rows // step
        if rows % step == 0 and row < step and not inner and remaining >= steps_per_row:
            whole = remaining // steps_per_row
            outer = [(whole, stride * steps_per_row, place * steps_per_row)] if whole > 1 else []
            yield first, [*outer, (steps_per_row, stride, place)] if steps_per_row > 1 else outer
            first += whole * steps_per_row
            continue
        count = max(1, min(remaining, -(-(rows - row - inner) // step)))
        yield first, [(count, stride, place)] if count > 1 else []
        first += count


def _dimension(shape: Sequence[int], strides: Sequence[int], stride: int) -> tuple[int, int]:
    """The dimension that ``stride`` moves along, and by how many elements of it."""
    for dim in range(len(shape)):
        if shape[dim] > 1 and strides[dim] <= stride and stride % strides[dim] == 0:
            return dim, stride // strides[dim]
    # Reached by a stride that moves along several dimensions at once.
    return len(shape) - 1, stride


def _coordinates(number: int, shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    return [number // stride % size for size, stride in zip(shape, strides, strict=True)]
