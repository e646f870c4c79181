"""Planning what a conversion computes: for each box of the result, the regions of the operands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from zerostart.checkpoint.catalog import TensorEntry
from zerostart.geometry import (
    Box,
    Copy,
    Region,
    copies_between,
    merge_runs,
    regions,
    row_major_strides,
    split_region,
)
from zerostart.planning.plan import Computation, Destination, Part, Step
from zerostart.planning.reads import PlanOptions, Segment, merged_reads, segments
from zerostart.recipe import Computed, Operand

__all__ = ["computations"]

Tensors = Mapping[str, TensorEntry]


def computations(
    tensors: Tensors, copies: Iterable[Copy], target: int, options: PlanOptions
) -> Iterator[Computation]:
    """The computations that give destination number ``target`` what ``copies`` take from computed tensors.

    One that can be evaluated box by box is cut until it takes no more memory than a chunk; one that needs
    an operand whole is evaluated once, for all copies out of it.
    """
    whole: dict[Computed, list[Copy]] = {}
    for copy in copies:
        source = copy.source
        assert isinstance(source, Computed), "a tensor of the checkpoint is read"
        if source.whole:
            whole.setdefault(source, []).append(copy)
            continue
        limit = max(1, options.chunk_size // source.bytes_per_element())
        for found in regions(source.shape, copy):
            for region in split_region(found, limit):
                yield _Builder(tensors, options).computation(source, [region], target)
    for source, taken in whole.items():
        yield _Builder(tensors, options).computation(source, _of_whole(source, taken), target)


def _of_whole(source: Computed, copies: Iterable[Copy]) -> list[Region]:
    """Copies out of the whole of a computed tensor."""
    factors = tuple((size,) for size in source.shape)
    box = Box((0,) * len(source.shape), source.shape)
    return [Region(factors, box, copy.to, copy.loops, copy.start) for copy in copies]


class _Builder:
    """Makes one computation: the registers and reads that its steps need, each once."""

    def __init__(self, tensors: Tensors, options: PlanOptions) -> None:
        self._tensors = tensors
        self._options = options
        self._registers: list[Destination] = []
        self._known: dict[tuple[Operand, Box], int] = {}
        self._segments: list[Segment] = []
        self._steps: list[Step] = []

    def computation(self, source: Computed, taken: Sequence[Region], target: int) -> Computation:
        """What gives ``target`` the regions ``taken`` of one box of ``source``."""
        self._step(source, taken, target)
        self._segments.sort(key=lambda segment: segment[:2])
        reads = tuple(merged_reads(self._segments, self._options))
        return Computation(tuple(self._registers), reads, tuple(self._steps))

    def _step(self, source: Computed, taken: Sequence[Region], target: int) -> None:
        """Evaluate a box of ``source``, after what it needs."""
        factors, box = taken[0].factors, taken[0].box
        operands = []
        for operand, aligned in zip(source.operands, source.aligned, strict=True):
            if aligned and source.elementwise:
                operand = operand.split(factors)
                region = _aligned(operand.shape, box)
            else:
                region = Box((0,) * len(operand.shape), operand.shape)
            operands.append((self._register(operand, region), region.extent))
        width = source.dtype.itemsize
        parts = tuple(
            Part(region.start * width, source.dtype, target, region.to, region.loops, direct=False)
            for region in taken
        )
        self._steps.append(Step(source, factors, box, tuple(operands), parts))

    def _register(self, operand: Operand, region: Box) -> int:
        """Number of the register with ``region`` of ``operand``; filled by then."""
        known = self._known.get((operand, region))
        if known is not None:
            return known
        number = len(self._registers)
        storage = Destination(f"register {number}", region.numel, region.numel, operand.dtype, direct=True)
        self._registers.append(storage)
        for copy in _pull_back(operand, region):
            source = copy.source
            if not isinstance(source, Computed):
                self._segments += segments(self._tensors, copy, number, storage, self._options)
            elif source.whole:
                self._step(source, _of_whole(source, [copy]), number)
            else:
                for found in regions(source.shape, copy):
                    self._step(source, [found], number)
        self._known[(operand, region)] = number
        return number


def _aligned(shape: tuple[int, ...], box: Box) -> Box:
    """The region of an operand of ``shape`` that is broadcast to what ``box`` is a part of."""
    lead = len(box.extent) - len(shape)
    one = [size == 1 for size in shape]
    return Box(
        tuple(0 if o else at for o, at in zip(one, box.origin[lead:], strict=True)),
        tuple(1 if o else n for o, n in zip(one, box.extent[lead:], strict=True)),
    )


def _pull_back(operand: Operand, region: Box) -> list[Copy]:
    if not prod(region.extent):
        return []
    strides = row_major_strides(region.extent)
    return merge_runs(copy for piece in operand.pieces for copy in copies_between(piece, region, 0, strides))
