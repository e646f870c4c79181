"""Strided runs of a row-major order as boxes: which part of a tensor a copy touches, dimension by dimension.

A copy addresses a tensor by element number. Where the tensor has to be computed first, and not read, its
region is wanted as a box. Dimensions are split where a stride asks for it (``n`` into ``n / q`` and ``q``),
so that a box holds little or nothing that the copy does not want.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zerostart.geometry.copies import Box, Copy, Loop
from zerostart.geometry.digits import row_major_strides


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a tensor whose dimensions were split, and a copy out of it."""

    #: For each dimension of the tensor the sizes that it is split into.
    factors: tuple[tuple[int, ...], ...]
    #: Of the split shape.
    box: Box
    #: Address of the first destination.
    to: int
    #: (size, stride in the box's row-major order, destination stride).
    loops: tuple[Loop, ...]
    #: Element of the box's own row-major order at which the copy begins.
    start: int = 0


def regions(shape: Sequence[int], copy: Copy) -> Iterator[Region]:
    """The regions of a tensor of ``shape`` that ``copy`` takes its elements from; disjoint in destination."""
    factors: list[tuple[int, ...]] = [(size,) for size in shape]
    for _, stride, _ in copy.loops:
        if stride:
            # 1. Split dimensions until each stride of the copy steps along one of them.
            _refine(factors, stride)
    split = [size for parts in factors for size in parts]
    # 2. Boxes of the split shape, cut where a loop carries into the next dimension.
    yield from _boxes(tuple(factors), split, copy.start, copy.to, list(copy.loops))


def split_region(region: Region, limit: int) -> Iterator[Region]:
    """``region``, one of ``regions``, in parts whose boxes have at most ``limit`` elements."""
    moving = [number for number, loop in enumerate(region.loops) if loop[1]]
    if region.box.numel <= limit or not moving:
        yield region
        return
    inside = row_major_strides(region.box.extent)
    # Cut along the largest stride: the parts stay runs of whole rows.
    number = max(moving, key=lambda n: region.loops[n][1])
    size, stride, _ = region.loops[number]
    dim, step = _dimension(region.box.extent, inside, stride)
    # Of this dimension what the other loops reach beyond the last step: each part keeps it.
    others = region.box.extent[dim] - 1 - (size - 1) * step
    most = max(1, (limit // inside[dim] - others - 1) // step + 1)
    for part in _split_loop(region, number, most):
        yield from split_region(part, limit)


def _split_loop(region: Region, number: int, most: int) -> Iterator[Region]:
    """Split ``region`` into parts of ``most`` steps of its loop ``number``."""
    size, _, place = region.loops[number]
    old = row_major_strides(region.box.extent)
    steps = [_dimension(region.box.extent, old, loop[1]) if loop[1] else (0, 0) for loop in region.loops]
    dim, step = steps[number]
    for first in range(0, size, most):
        count = min(most, size - first)
        origin, extent = list(region.box.origin), list(region.box.extent)
        origin[dim] += first * step
        # The box shrinks by the steps that are gone; what other loops add to this dimension stays.
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
        # More steps than this dimension has room for, with what other loops add to it: the loop carries.
        if size > -(-(shape[dim] - origin[dim] - (extent[dim] - 1)) // step):
            for first, part in _cut(loops[number], shape[dim], step, origin[dim], extent[dim] - 1):
                rest = [*loops[:number], *part, *loops[number + 1 :]]
                _, source, place = loops[number]
                yield from _boxes(factors, shape, start + first * source, to + first * place, rest)
            return
        extent[dim] += (size - 1) * step
        steps.append((dim, step))
    inside = row_major_strides(extent)
    local = tuple(
        (size, inside[dim] * step if step else 0, place)
        for (size, _, place), (dim, step) in zip(loops, steps, strict=True)
    )
    yield Region(factors, Box(tuple(origin), tuple(extent)), to, local)


def _cut(loop: Loop, rows: int, step: int, at: int, taken: int) -> Iterator[tuple[int, list[Loop]]]:
    """Cut a loop that runs out of its dimension of ``rows``: ``(first step, loops)`` of the parts.

    ``at`` is where in the dimension it starts, and ``taken`` what other loops add to that.
    """
    size, stride, place = loop
    first = 0
    while first < size:
        here = (at + first * step) % rows
        left = size - first
        each = rows // step
        if rows % step == 0 and here < step and not taken and left >= each:
            whole = left // each
            outer = [(whole, stride * each, place * each)] if whole > 1 else []
            yield first, [*outer, (each, stride, place)] if each > 1 else outer
            first += whole * each
            continue
        count = max(1, min(left, -(-(rows - here - taken) // step)))
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
