"""Random graphs of index-moving torch operations, on symbolic tensors and element numbers.

The reference is eager torch on 64-bit integers that number the source elements: its result is the exact index
map.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from zerostart import geometry
from zerostart.recipe import SymbolicTensor

SOURCE_STRIDE = 10_000
MOST_ELEMENTS = 4_000
KINDS = (
    *("reshape", "transpose", "permute", "narrow", "step", "select", "chunk", "unbind", "split"),
    *("unsqueeze", "squeeze", "expand", "repeat", "flip", "roll", "join"),
)


@dataclass(frozen=True)
class Graph:
    """Pairs of a symbolic tensor and its expected element numbers."""

    sources: Mapping[str, torch.Tensor]
    results: list[tuple[SymbolicTensor, torch.Tensor]]


def element_numbers(symbolic: SymbolicTensor, sources: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the element numbers of the pieces; -1 for elements without a piece."""
    shape = tuple(symbolic.shape)
    out = torch.full((symbolic.numel(),), -1)
    box = geometry.Box((0,) * len(shape), shape)
    run_copies(symbolic, box, 0, geometry.row_major_strides(shape), out, sources)
    return out.view(shape)


def run_copies(
    symbolic: SymbolicTensor,
    box: geometry.Box,
    to: int,
    strides: tuple[int, ...],
    out: torch.Tensor,
    sources: Mapping[str, torch.Tensor],
) -> int:
    """Run the copies that fill ``box``; return the number of copied elements."""
    copied = 0
    for piece in symbolic.pieces:
        for copy in geometry.copies_between(piece, box, to, strides):
            source = sources[str(copy.source)].reshape(-1)
            sizes = [size for size, _, _ in copy.loops]
            values = source.as_strided(sizes, [s for _, s, _ in copy.loops], copy.start)
            out.as_strided(sizes, [d for _, _, d in copy.loops], copy.to).copy_(values)
            copied += copy.numel
    return copied


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3))
    numel = torch.Size(shape).numel()
    sources: dict[str, torch.Tensor] = {}
    results: list[tuple[SymbolicTensor, torch.Tensor]] = []
    for number in range(draw(st.integers(1, 3))):
        numbers = torch.arange(number * SOURCE_STRIDE, number * SOURCE_STRIDE + numel).view(shape)
        sources[f"s{number}"] = numbers
        results.append((SymbolicTensor.of(f"s{number}", shape, torch.float32), numbers))
    for _ in range(draw(st.integers(1, 6))):
        step = draw(steps(results))
        if step is not None:
            results.append(step)
    return Graph(sources, results)


@st.composite
def steps(
    draw: st.DrawFn, previous: list[tuple[SymbolicTensor, torch.Tensor]]
) -> tuple[SymbolicTensor, torch.Tensor] | None:
    """Draw one more operation on a known tensor."""
    symbolic, eager = draw(st.sampled_from(previous))
    if eager.numel() > MOST_ELEMENTS:
        return None
    function = draw(operations(eager))
    if function is None:
        alike = [pair for pair in previous if pair[1].shape == eager.shape]
        parts = draw(st.lists(st.sampled_from(alike), min_size=1, max_size=3))
        join = draw(st.sampled_from([torch.cat, torch.stack]))
        dim = draw(st.integers(0, max(0, eager.dim() - 1)))
        if eager.dim() == 0:
            join = torch.stack
        return join([s for s, _ in parts], dim), join([e for _, e in parts], dim)
    return function(symbolic), function(eager)


@st.composite
def operations(draw: st.DrawFn, t: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Draw a unary operation that fits ``t``; None for one that joins several tensors."""
    if t.dim() == 0 or t.numel() == 0:
        return lambda x: x.unsqueeze(0)
    dim = draw(st.integers(0, t.dim() - 1))
    size = t.shape[dim]
    kind = draw(st.sampled_from(KINDS))
    if kind == "reshape":
        shape = draw(factorisations(t.numel()))
        return lambda x: x.reshape(shape)
    if kind == "transpose":
        second = draw(st.integers(0, t.dim() - 1))
        return lambda x: x.transpose(dim, second)
    if kind == "permute":
        order = draw(st.permutations(range(t.dim())))
        return lambda x: x.permute(order)
    if kind == "narrow":
        start = draw(st.integers(0, size))
        length = draw(st.integers(0, size - start))
        return lambda x: x.narrow(dim, start, length)
    if kind == "step":
        start, step = draw(st.integers(0, size)), draw(st.integers(1, 4))
        return lambda x: x[(slice(None),) * dim + (slice(start, None, step),)]
    if kind == "select":
        index = draw(st.integers(-size, size - 1))
        return lambda x: x.select(dim, index)
    if kind in ("chunk", "split"):
        count = draw(st.integers(1, size))
        which = draw(st.integers(0, 7))
        make = torch.chunk if kind == "chunk" else torch.split
        return lambda x: (parts := make(x, count, dim))[which % len(parts)]
    if kind == "unbind":
        index = draw(st.integers(0, size - 1))
        return lambda x: x.unbind(dim)[index]
    if kind == "unsqueeze":
        return lambda x: x.unsqueeze(dim)
    if kind == "squeeze":
        return lambda x: x.squeeze()
    if kind == "expand":
        return lambda x: x.unsqueeze(dim).expand(*x.shape[:dim], 2, *x.shape[dim:])
    if kind == "repeat":
        times = draw(st.lists(st.integers(1, 2), min_size=t.dim(), max_size=t.dim()))
        return lambda x: x.repeat(times)
    if kind == "flip":
        return lambda x: x.flip([dim])
    if kind == "roll":
        by = draw(st.integers(-3, 3))
        return lambda x: x.roll(by, dim)
    return None


@st.composite
def factorisations(draw: st.DrawFn, numel: int) -> list[int]:
    shape: list[int] = []
    remaining = numel
    while remaining > 1:
        factor = draw(st.sampled_from([f for f in range(2, remaining + 1) if remaining % f == 0]))
        shape.append(factor)
        remaining //= factor
    if draw(st.booleans()):
        shape.insert(draw(st.integers(0, len(shape))), 1)
    return shape
