"""The join itself: pull each local box back through its recipe, and turn what comes out into reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from zerostart.checkpoint.catalog import Catalog
from zerostart.errors import CoverageError
from zerostart.geometry import Copy, copies_between, merge_runs
from zerostart.geometry.layout import Layout
from zerostart.recipe import Computed, Recipe
from zerostart.transfer.planning.computing import computations
from zerostart.transfer.planning.plan import Computation, Destination, Plan, SharedReads
from zerostart.transfer.planning.reads import PlanOptions, Segment, merged_reads, segments


def join(
    catalog: Catalog,
    wanted: Iterable[tuple[Recipe, Layout, Destination]],
    options: PlanOptions | None = None,
    groups: Sequence[tuple[int, ...]] | None = None,
) -> Plan:
    """The plan that fills each destination with its layout's share of its recipe.

    ``groups`` has for each destination the ranks that want the same of it. Raises CoverageError for a share
    that its recipe does not fill.
    """
    options = options or PlanOptions()
    destinations: list[Destination] = []
    # By the ranks that share them; what is calculated each rank reads by itself.
    found: defaultdict[tuple[int, ...], list[Segment]] = defaultdict(list)
    computed: list[Computation] = []
    for recipe, layout, destination in wanted:
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
                found[group] += segments(catalog.tensors, copy, number, destination, options)
        computed += computations(catalog.tensors, to_compute, number, options)
    return Plan(
        storage=catalog.storage,
        destinations=tuple(destinations),
        reads=tuple(merged_reads(found.pop((), []), options)),
        chunk_size=options.chunk_size,
        computations=tuple(computed),
        shared=tuple(
            SharedReads(group, tuple(merged_reads(of_group, options)))
            for group, of_group in sorted(found.items())
        ),
    )


def _check_filled(recipe: Recipe, layout: Layout, copies: Iterable[Copy]) -> None:
    """Memory that no read fills is never taken for weights, whatever went wrong before: CoverageError."""
    have, need = sum(copy.numel for copy in copies), sum(placed.box.numel for placed in layout.boxes)
    if have != need:
        raise CoverageError(
            f"{recipe.target.name}: the checkpoint holds only {have} of the {need} elements that "
            "are needed; a part of it is missing"
        )


def pull_back(recipe: Recipe, layout: Layout) -> list[Copy]:
    """The copies that fill ``layout``'s share of the target of ``recipe``, from any source."""
    # A run of the row-major order is several boxes: where their bytes follow each other, they are one again.
    return merge_runs(
        copy
        for placed in layout.boxes
        for piece in recipe.pieces
        for copy in copies_between(piece, placed.box, placed.to, placed.strides)
    )
