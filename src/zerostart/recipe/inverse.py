"""Recipes the other way: which tensors of a checkpoint a model's tensors can be put back into.

A recipe can be reversed where its elements are only moved, and where it, with the recipes that share its
sources, takes every element of these exactly once. Then the copies that it plans for a load are the copies of
a save. All is decided on integers, whole groups of tensors that hang together at a time.
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

#: Most pieces into which one tensor is cut on its way back.
MOST_PIECES = 1 << 14


@dataclass(frozen=True)
class Reversal:
    """Recipes that can be taken backwards, by target; and why the others cannot."""

    recipes: Mapping[str, Recipe]
    reasons: Mapping[str, str]


def reversal(recipes: Mapping[str, Recipe], stored: Mapping[str, TensorEntry]) -> Reversal:
    """Which of ``recipes``, by their targets' names, can be taken backwards into the tensors ``stored``."""
    # Groups of targets that share sources are reversed together or not at all: a source is whole only when
    # all who have elements of it give them back.
    plain = {name: _row_major(recipe, stored) for name, recipe in recipes.items()}
    reasons: dict[str, str] = {}
    kept: dict[str, Recipe] = {}
    for group in _connected(
        {name: {s for piece in recipe.pieces for s in piece.source} for name, recipe in plain.items()}
    ):
        reason = _reason({name: plain[name] for name in group}, stored)
        if reason is None:
            kept.update({name: plain[name] for name in group})
        else:
            reasons.update(dict.fromkeys(group, reason))
    # In the order in which they came.
    return Reversal({name: kept[name] for name in recipes if name in kept}, reasons)


def _reason(group: Mapping[str, Recipe], stored: Mapping[str, TensorEntry]) -> str | None:
    """Why a group of recipes that share sources cannot be reversed; None where it can."""
    for name, recipe in group.items():
        if recipe.computed:
            return f"{name} is calculated, and not only moved"
    for source, copies in _by_source({n: (r.target.shape, r.pieces) for n, r in group.items()}).items():
        entry = stored.get(source)
        if entry is None or entry.strides is not None:
            return f"{source} is not stored row by row"
        # Twice (a broadcast) or never (a slice that is dropped): neither can be written back.
        if not _tiled(copies, entry.numel):
            return f"not every element of {source} is in the model once"
    return None


def _row_major(recipe: Recipe, stored: Mapping[str, TensorEntry]) -> Recipe:
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


def _by_source(
    tensors: Mapping[str, tuple[Sequence[int], Sequence[Piece]]],
) -> dict[str, list[tuple[str, Copy]]]:
    """The copies that fill tensors, with the names of these, by the source of their elements."""
    found: dict[str, list[tuple[str, Copy]]] = {}
    for name, (shape, pieces) in tensors.items():
        box, strides = Box((0,) * len(shape), tuple(shape)), row_major_strides(shape)
        for piece in pieces:
            for copy in geometry.copies_between(piece, box, 0, strides):
                found.setdefault(str(copy.source), []).append((name, copy))
    return found


def _tiled(copies: Sequence[tuple[str, Copy]], numel: int) -> bool:
    """True if each of ``numel`` elements is copied once."""
    return tiles([(c.start, tuple((n, stride) for n, stride, _ in c.loops)) for _, c in copies], numel)


def inverted(
    files: Mapping[str, tuple[Sequence[int], Sequence[Piece]]], shapes: Mapping[str, Sequence[int]]
) -> dict[str, tuple[Piece, ...]]:
    """Of each tensor of ``shapes`` the pieces out of ``files``, which are given as pieces out of these.

    Tensors that cannot be put into the files element by element, each once, are not there, and neither are
    those that share files with them.
    """
    sources = {name: {s for piece in pieces for s in piece.source} for name, (_, pieces) in files.items()}
    found: dict[str, tuple[Piece, ...]] = {}
    for group in _connected(sources):
        moved = all(not isinstance(s, Computed) for n in group for p in files[n][1] for s in p.source)
        made = _inverted({name: files[name] for name in group}, shapes) if moved else None
        found.update(made or {})
    return found


def _inverted(
    files: Mapping[str, tuple[Sequence[int], Sequence[Piece]]], shapes: Mapping[str, Sequence[int]]
) -> dict[str, tuple[Piece, ...]] | None:
    found: dict[str, tuple[Piece, ...]] = {}
    for target, copies in _by_source(files).items():
        shape = tuple(shapes[target])
        if not _tiled(copies, prod(shape)):
            return None
        try:
            # As pieces of one long row, which is then given the target's shape.
            pieces = [p for name, copy in copies for p in _backwards(copy, name, prod(files[name][0]))]
            found[target] = geometry.reshape(pieces, (prod(shape),), shape)
        except ValueError:
            return None
    return found


def _backwards(copy: Copy, name: str, numel: int) -> Iterator[Piece]:
    """The copy as pieces of its source, seen as one row, out of the tensor ``name`` that it fills.

    Raises ValueError where that takes too many.
    """
    # By the stride in the tensor that is asked for: what is dense there becomes the digits of one piece, and
    # each step of what is left a piece of its own.
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


def _connected(sources: Mapping[str, Iterable[object]]) -> list[list[str]]:
    """Names in groups that share sources, directly or through others."""
    # Union-find: targets and sources are nodes of one forest, told apart by their first word.
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
