"""Invert recipes, to write a model's tensors back into a checkpoint.

A recipe is reversible if it only moves elements, and if all recipes of its sources together use each source
element exactly once. The copies planned for a load then serve as the copies of a save. Decisions need only
integers. Recipes that share a source are reversed together or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from zerostart import geometry
from zerostart.checkpoint.catalog import TensorEntry
from zerostart.geometry import Box, Copy, Piece, row_major_strides
from zerostart.geometry.tiling import tiles
from zerostart.recipe.recipe import Recipe
from zerostart.recipe.values import Computed

#: Maximum number of pieces into which an inverted tensor is cut.
MOST_PIECES = 1 << 14


@dataclass(frozen=True)
class Reversal:
    """Reversible recipes by target, and reasons for the others."""

    recipes: Mapping[str, Recipe]
    reasons: Mapping[str, str]


def find_reversible(recipes: Mapping[str, Recipe], stored: Mapping[str, TensorEntry]) -> Reversal:
    """Find recipes that can be reversed into ``stored``."""
    # A source is complete only if all targets that use it give its elements back.
    plain = {name: _make_row_major(recipe, stored) for name, recipe in recipes.items()}
    reasons: dict[str, str] = {}
    reversible: dict[str, Recipe] = {}
    for group in _group_connected(
        {name: {s for piece in recipe.pieces for s in piece.source} for name, recipe in plain.items()}
    ):
        reason = _find_obstacle({name: plain[name] for name in group}, stored)
        if reason is None:
            reversible.update({name: plain[name] for name in group})
        else:
            reasons.update(dict.fromkeys(group, reason))
    # Keep the order of ``recipes``.
    return Reversal({name: reversible[name] for name in recipes if name in reversible}, reasons)


def _find_obstacle(group: Mapping[str, Recipe], stored: Mapping[str, TensorEntry]) -> str | None:
    for name, recipe in group.items():
        if recipe.computed:
            return f"{name} is calculated, and not only moved"
    for source, copies in _group_by_source({n: (r.target.shape, r.pieces) for n, r in group.items()}).items():
        entry = stored.get(source)
        if entry is None or entry.strides is not None:
            return f"{source} is not stored row by row"
        # An element used twice (a broadcast) or never (a dropped slice) cannot be written back.
        if not _is_tiled(copies, entry.numel):
            return f"not every element of {source} is in the model once"
    return None


def _make_row_major(recipe: Recipe, stored: Mapping[str, TensorEntry]) -> Recipe:
    if len(recipe.pieces) == 1 and len(recipe.pieces[0].source) == 1:
        source = recipe.pieces[0].source[0]
        entry = None if isinstance(source, Computed) else stored.get(str(source))
        if (
            entry is not None
            and entry.strides is not None
            and entry.shape == recipe.target.shape
            and geometry.whole(source, entry.shape, entry.strides) == recipe.pieces
        ):
            return Recipe(recipe.target, geometry.whole(source, entry.shape), recipe.converted)
    return recipe


def _group_by_source(
    tensors: Mapping[str, tuple[Sequence[int], Sequence[Piece]]],
) -> dict[str, list[tuple[str, Copy]]]:
    copies_by_source: dict[str, list[tuple[str, Copy]]] = {}
    for name, (shape, pieces) in tensors.items():
        box, strides = Box((0,) * len(shape), tuple(shape)), row_major_strides(shape)
        for piece in pieces:
            for copy in geometry.copies_between(piece, box, 0, strides):
                copies_by_source.setdefault(str(copy.source), []).append((name, copy))
    return copies_by_source


def _is_tiled(copies: Sequence[tuple[str, Copy]], numel: int) -> bool:
    return tiles([(c.start, tuple((n, stride) for n, stride, _ in c.loops)) for _, c in copies], numel)


def invert_pieces(
    files: Mapping[str, tuple[Sequence[int], Sequence[Piece]]], shapes: Mapping[str, Sequence[int]]
) -> dict[str, tuple[Piece, ...]]:
    """Return the pieces of each tensor of ``shapes`` out of ``files``.

    ``files`` are described as pieces of these tensors. A tensor is left out if its elements are not in the
    files exactly once, or if it shares files with such a tensor.
    """
    sources = {name: {s for piece in pieces for s in piece.source} for name, (_, pieces) in files.items()}
    pieces_by_name: dict[str, tuple[Piece, ...]] = {}
    for group in _group_connected(sources):
        only_moves = all(not isinstance(s, Computed) for n in group for p in files[n][1] for s in p.source)
        pieces = _invert_group({name: files[name] for name in group}, shapes) if only_moves else None
        pieces_by_name.update(pieces or {})
    return pieces_by_name


def _invert_group(
    files: Mapping[str, tuple[Sequence[int], Sequence[Piece]]], shapes: Mapping[str, Sequence[int]]
) -> dict[str, tuple[Piece, ...]] | None:
    pieces_by_name: dict[str, tuple[Piece, ...]] = {}
    for target, copies in _group_by_source(files).items():
        shape = tuple(shapes[target])
        if not _is_tiled(copies, prod(shape)):
            return None
        try:
            # Make pieces of one row, then reshape them to the target.
            pieces = [p for name, copy in copies for p in _invert_copy(copy, name, prod(files[name][0]))]
            pieces_by_name[target] = geometry.reshape(pieces, (prod(shape),), shape)
        except ValueError:
            return None
    return pieces_by_name


def _invert_copy(copy: Copy, name: str, numel: int) -> Iterator[Piece]:
    """Yield the inverse of a copy as pieces of ``name``.

    The source is seen as one row. Raises ValueError if that takes more than ``MOST_PIECES``.
    """
    # Sort by the stride in the source. Loops that are dense there become the digits of one piece; each step
    # of the other loops is a piece.
    loops = sorted(copy.loops, key=lambda loop: -loop[1])
    inner: list[tuple[int, int]] = []
    length = 1
    while loops and loops[-1][1] == length:
        size, _, stride = loops.pop()
        inner.insert(0, (size, stride))
        length *= size
    if prod(size for size, _, _ in loops) > MOST_PIECES:
        raise ValueError(f"{name} is scattered over too many pieces")
    digits = geometry.simplify(tuple(inner), numel)
    for indices in product(*(range(size) for size, _, _ in loops)):
        start = copy.start + sum(i * loop[1] for i, loop in zip(indices, loops, strict=True))
        to = copy.to + sum(i * loop[2] for i, loop in zip(indices, loops, strict=True))
        yield Piece((start,), (digits,), (name,), numel, to)


def _group_connected(sources: Mapping[str, Iterable[object]]) -> list[list[str]]:
    # Union-find over targets and sources; the first word of a node distinguishes them.
    parent: dict[object, object] = {}

    def root(node: object) -> object:
        while parent.setdefault(node, node) is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for name, used in sources.items():
        for source in used:
            parent[root(("source", source))] = root(("target", name))
    groups: dict[object, list[str]] = {}
    for name in sources:
        groups.setdefault(root(("target", name)), []).append(name)
    return list(groups.values())
