"""Pull each local box back through its recipe, and turn the copies into reads."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from zerostart.checkpoint.catalog import Catalog, TensorEntry
from zerostart.errors import CoverageError
from zerostart.geometry import (
    Box,
    Copy,
    Piece,
    Region,
    copies_between,
    merge_runs,
    regions,
    row_major_strides,
    split_region,
)
from zerostart.geometry.layout import Layout
from zerostart.recipe import Computed, Recipe, Value
from zerostart.transfer.planning.plan import (
    Computation,
    ComputeStep,
    Destination,
    OperandView,
    Part,
    Plan,
    PlanOptions,
    Segment,
    SharedReads,
    cut_segments,
    merge_reads,
)


def join(
    catalog: Catalog,
    shares: Iterable[tuple[Recipe, Layout, Destination]],
    options: PlanOptions | None = None,
    groups: Sequence[tuple[int, ...]] | None = None,
) -> Plan:
    """Plan the reads that fill destinations with their layouts' shares.

    ``groups`` has the ranks that need the same slice, for each destination. Raises CoverageError for a share
    that its recipe does not fill.
    """
    options = options or PlanOptions()
    destinations: list[Destination] = []
    # Segments by the ranks that share their reads.
    segments_by_ranks: defaultdict[tuple[int, ...], list[Segment]] = defaultdict(list)
    computed: list[Computation] = []
    for recipe, layout, destination in shares:
        number = len(destinations)
        group = groups[number] if groups is not None and len(groups[number]) > 1 else ()
        destinations.append(destination)
        to_compute: list[Copy] = []
        copies = pull_back(recipe, layout)
        _check_filled(recipe, layout, copies)
        for copy in copies:
            if isinstance(copy.source, Computed):
                to_compute.append(copy)
            else:
                segments_by_ranks[group] += cut_segments(catalog.tensors, copy, number, destination, options)
        computed += plan_computations(catalog.tensors, to_compute, number, options)
    return Plan(
        storage=catalog.storage,
        destinations=tuple(destinations),
        reads=tuple(merge_reads(segments_by_ranks.pop((), []), options)),
        chunk_size=options.chunk_size,
        computations=tuple(computed),
        shared=tuple(
            SharedReads(group, tuple(merge_reads(of_group, options)))
            for group, of_group in sorted(segments_by_ranks.items())
        ),
    )


def _check_filled(recipe: Recipe, layout: Layout, copies: Iterable[Copy]) -> None:
    have, need = sum(copy.numel for copy in copies), sum(placed.box.numel for placed in layout.boxes)
    if have != need:
        raise CoverageError(
            f"{recipe.target.name}: the checkpoint holds only {have} of the {need} elements that "
            "are needed; a part of it is missing"
        )


def pull_back(recipe: Recipe, layout: Layout) -> list[Copy]:
    """Return the copies that fill a layout's share of a target."""
    # A run of the row-major order is several boxes; join them if their bytes are adjacent.
    return merge_runs(
        copy
        for placed in layout.boxes
        for piece in recipe.pieces
        for copy in copies_between(piece, placed.box, placed.to, placed.strides)
    )


Tensors = Mapping[str, TensorEntry]


def plan_computations(
    tensors: Tensors, copies: Iterable[Copy], target: int, options: PlanOptions
) -> Iterator[Computation]:
    """Plan computations of copies to destination ``target``.

    Exact ones are cut into boxes of at most a chunk; others are evaluated whole.
    """
    operands = Operands()
    by_source: dict[Computed, list[Copy]] = {}
    for copy in copies:
        assert isinstance(copy.source, Computed), "a tensor of the checkpoint is read"
        by_source.setdefault(copy.source, []).append(copy)
    for source, taken in by_source.items():
        limit = max(1, options.chunk_size // source.element_bytes)
        for regions_of_box in _split_regions(source, taken, limit):
            yield _Builder(tensors, options, operands).build(source, regions_of_box, target)


def _split_regions(
    source: Computed, copies: Sequence[Copy], limit: int | None = None
) -> Iterator[Sequence[Region]]:
    if source.whole:
        factors = tuple((size,) for size in source.shape)
        box = Box((0,) * len(source.shape), source.shape)
        yield [Region(factors, box, copy.to, copy.loops, copy.start) for copy in copies]
        return
    for copy in copies:
        for found in regions(source.shape, copy):
            parts = [found] if limit is None else split_region(found, limit)
            yield from ([part] for part in parts)


class _Builder:
    def __init__(self, tensors: Tensors, options: PlanOptions, operands: Operands) -> None:
        self._tensors = tensors
        self._options = options
        self._operands = operands
        self._registers: list[Destination] = []
        self._known: dict[tuple[int, Box], int] = {}
        self._segments: list[Segment] = []
        self._steps: list[ComputeStep] = []

    def build(self, source: Computed, result_regions: Sequence[Region], target: int) -> Computation:
        self._add_step(source, result_regions, target)
        self._segments.sort(key=lambda segment: segment[:2])
        reads = tuple(merge_reads(self._segments, self._options))
        return Computation(tuple(self._registers), reads, tuple(self._steps))

    def _add_step(self, source: Computed, result_regions: Sequence[Region], target: int) -> None:
        factors, box = result_regions[0].factors, result_regions[0].box
        operands = []
        for operand, aligned in zip(source.operands, source.aligned, strict=True):
            if aligned:
                # Boxes are in the split shape, so split the operand in the same way.
                operand = self._operands.split(operand, factors)
                region = _align_box(operand.shape, box)
                operands.append(self._add_register(operand, region, region.extent))
            else:
                operands.append(self._add_whole(operand))
        width = source.dtype.itemsize
        parts = tuple(
            Part(region.start * width, source.dtype, target, region.to, region.loops, direct=False)
            for region in result_regions
        )
        self._steps.append(ComputeStep(source, factors, box, tuple(operands), parts))

    def _add_whole(self, operand: Value) -> OperandView:
        """Plan the whole operand in the strides of eager torch."""
        box = Box((0,) * len(operand.shape), operand.shape)
        # Registers are row-major.
        if operand.strides is None or not operand.numel():
            return self._add_register(operand, box, operand.shape)
        # Expanded dimensions are in memory once.
        extent = tuple(
            size if stride else 1 for size, stride in zip(operand.shape, operand.strides, strict=True)
        )
        return self._add_register(operand, Box(box.origin, extent), operand.shape, operand.strides)

    def _add_register(
        self,
        operand: Value,
        region: Box,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
    ) -> OperandView:
        # Registers are known by the identity of their operand.
        operand = self._operands.find_equal(operand)
        register = self._known.get((id(operand), region))
        if register is not None:
            return register, shape, strides
        number = len(self._registers)
        size = region.numel
        if strides is not None:
            size = 1 + sum((n - 1) * stride for n, stride in zip(region.extent, strides, strict=True))
        # Products of short types read on into a gap and multiply it by zero, so it must not be NaN.
        owned = size if size == region.numel else 0
        storage = Destination(f"register {number}", size, owned, operand.dtype, direct=True)
        self._registers.append(storage)
        computed: dict[Computed, list[Copy]] = {}
        for copy in self._operands.copies(operand, region, strides):
            if isinstance(copy.source, Computed):
                computed.setdefault(copy.source, []).append(copy)
            else:
                self._segments += cut_segments(self._tensors, copy, number, storage, self._options)
        # Steps of computed operands come before the step that uses this register.
        for source, copies in computed.items():
            for taken in _split_regions(source, copies):
                self._add_step(source, taken, number)
        # Only now, so that later users come after its steps.
        self._known[(id(operand), region)] = number
        return number, shape, strides


def _align_box(shape: tuple[int, ...], box: Box) -> Box:
    lead = len(box.extent) - len(shape)
    is_one = [size == 1 for size in shape]
    return Box(
        tuple(0 if o else at for o, at in zip(is_one, box.origin[lead:], strict=True)),
        tuple(1 if o else n for o, n in zip(is_one, box.extent[lead:], strict=True)),
    )


Factors = tuple[tuple[int, ...], ...]


class Operands:
    """Cache of operands; each is sorted and split once."""

    def __init__(self) -> None:
        # Hashing an operand takes time proportional to its pieces.
        self._equal: dict[Value, Value] = {}
        self._known: dict[int, tuple[Value, Value]] = {}
        self._split: dict[tuple[int, Factors], Value] = {}
        self._sorted: dict[int, _Sorted] = {}

    def find_equal(self, operand: Value) -> Value:
        """Return the first operand that equals this one."""
        if id(operand) not in self._known:
            self._known[id(operand)] = (operand, self._equal.setdefault(operand, operand))
        return self._known[id(operand)][1]

    def split(self, operand: Value, factors: Sequence[Sequence[int]]) -> Value:
        """Split the operand like a result; see ``Value.split``."""
        key = (id(self.find_equal(operand)), tuple(tuple(parts) for parts in factors))
        if key not in self._split:
            self._split[key] = self.find_equal(operand.split(factors))
        return self._split[key]

    def copies(self, operand: Value, box: Box, strides: Sequence[int] | None) -> list[Copy]:
        """Return the copies of ``box``, row-major or with ``strides``."""
        operand = self.find_equal(operand)
        if id(operand) not in self._sorted:
            self._sorted[id(operand)] = _Sorted(operand.pieces)
        if not box.numel:
            return []
        steps = row_major_strides(box.extent) if strides is None else strides
        pieces = self._sorted[id(operand)].find_meeting(box)
        return merge_runs([copy for piece in pieces for copy in copies_between(piece, box, 0, steps)])


class _Sorted:
    def __init__(self, pieces: Sequence[Piece]) -> None:
        dims = range(len(pieces[0].origin)) if pieces else range(0)
        self._dim = max(dims, key=lambda dim: len({piece.origin[dim] for piece in pieces}), default=None)
        self._pieces = list(pieces)
        if self._dim is None:
            return
        dim = self._dim
        self._pieces.sort(key=lambda piece: piece.origin[dim])
        self._first = [piece.origin[dim] for piece in self._pieces]
        # Furthest end of all pieces up to each one, ascending.
        self._last = list(accumulate((p.origin[dim] + p.extent[dim] for p in self._pieces), max))

    def find_meeting(self, box: Box) -> Sequence[Piece]:
        """Return the pieces that may overlap ``box``."""
        if self._dim is None:
            return self._pieces
        low = box.origin[self._dim]
        begin = bisect_right(self._last, low)
        return self._pieces[begin : bisect_left(self._first, low + box.extent[self._dim])]
