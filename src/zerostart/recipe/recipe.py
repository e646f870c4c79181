"""Recipes of parameters and models, and the coverage of both sides."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

import torch

from zerostart.errors import CoverageError
from zerostart.geometry import Piece
from zerostart.recipe.values import Computed


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor that the model expects under a state-dict name."""

    name: str
    #: Unsharded shape.
    shape: tuple[int, ...]
    #: Final dtype.
    dtype: torch.dtype
    buffer: bool = False
    #: True if a floating tensor takes the dtype of the checkpoint instead.
    as_stored: bool = False


@dataclass(frozen=True, slots=True)
class Recipe:
    """Sources of the elements of ``target``, as pieces.

    ``converted`` is False if the tensor is taken as it is stored.
    """

    target: Target
    pieces: tuple[Piece, ...]
    converted: bool = False

    @property
    def computed(self) -> bool:
        """True if any element is computed."""
        return any(isinstance(source, Computed) for piece in self.pieces for source in piece.source)

    @property
    def computed_whole(self) -> bool:
        """True if a computation needs whole tensors, of any size."""
        return any(
            isinstance(source, Computed) and source.whole for piece in self.pieces for source in piece.source
        )


@dataclass(frozen=True)
class Recipes:
    """Recipes by target name, in state-dict order, and their coverage.

    ``conversions`` are the library's objects that matched; a save reverses them.
    """

    by_name: dict[str, Recipe]
    coverage: Coverage
    conversions: tuple[object, ...] = field(default=())
    #: Number of unfilled elements of partly filled targets, whose recipes do not tile the shape.
    partial: dict[str, int] = field(default_factory=dict)

    @property
    def converted(self) -> tuple[str, ...]:
        """Names of converted targets."""
        return tuple(name for name, recipe in self.by_name.items() if recipe.converted)

    @property
    def computed(self) -> tuple[str, ...]:
        """Names of computed targets."""
        return tuple(name for name, recipe in self.by_name.items() if recipe.computed)

    @property
    def computed_whole(self) -> tuple[str, ...]:
        """Names of targets that are computed from whole tensors."""
        return tuple(name for name, recipe in self.by_name.items() if recipe.computed_whole)


Shape = tuple[int, ...]
#: Maximum number of names of one kind in an error message.
SHOWN = 8


@dataclass(frozen=True)
class Coverage:
    """Names without a counterpart on the other side."""

    #: Names of the model that the checkpoint lacks.
    missing: tuple[str, ...] = ()
    #: Names of the checkpoint that the model does not use.
    unexpected: tuple[str, ...] = ()
    #: Shapes by name: in the checkpoint after conversion, and in the model.
    mismatched: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)
    #: Missing or unexpected names that the model declares ignorable.
    ignored: tuple[str, ...] = ()

    def ignoring(self, missing: Iterable[str], unexpected: Iterable[str]) -> Coverage:
        """Ignore names that match the model's patterns (regular expressions, searched)."""
        lost, kept_missing = _partition(self.missing, missing)
        extra, kept_unexpected = _partition(self.unexpected, unexpected)
        return Coverage(kept_missing, kept_unexpected, self.mismatched, (*self.ignored, *lost, *extra))

    def check(self, source: str, model: str, strict: bool, converted: bool = False) -> None:
        """Raise CoverageError for a mismatch, or for an open name if ``strict``.

        ``converted``: the names and shapes come from the caller's converter.
        """
        if not self.mismatched and not (strict and (self.missing or self.unexpected)):
            return
        after = ", as the converter gives it," if converted else ""
        lines = [f"{source}{after} does not match {model}:"]
        shapes = [
            f"{name} is {list(have)} in the checkpoint and {list(want)} in the model"
            for name, (have, want) in self.mismatched.items()
        ]
        lines += _list_some("mismatched", shapes)
        if strict:
            lines += _list_some(
                "missing", [self._suggest_nearest(name) for name in self.missing[:SHOWN]], self.missing
            )
            lines += _list_some("unexpected", self.unexpected[:SHOWN], self.unexpected)
        lines.append(self._suggest_remedy(converted))
        raise CoverageError(lines, self.missing, self.unexpected, self.mismatched)

    def _suggest_nearest(self, name: str) -> str:
        # Limit the number of names: the search takes time proportional to their product.
        close = get_close_matches(name, self.unexpected[:5000], n=1, cutoff=0.75)
        return f"{name} (the checkpoint has {close[0]})" if close else name

    def _suggest_remedy(self, converted: bool) -> str:
        lenient = ", or pass strict=False to initialise what is missing and to ignore what is unexpected."
        if converted:
            ending = "." if self.mismatched else lenient
            return f"What the converter returns has to have the model's names and shapes{ending}"
        if self.mismatched:
            return (
                "Shapes must agree: check that the model's configuration is the one of this checkpoint, "
                "or pass a converter."
            )
        return f"Check that the checkpoint is of this architecture, pass a converter{lenient}"


def _partition(names: Sequence[str], patterns: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    # Compile each one: joining patterns would break flags and references to groups.
    compiled = [re.compile(pattern) for pattern in patterns]
    matched = {name for name in names if any(pattern.search(name) for pattern in compiled)}
    return (
        tuple(name for name in names if name in matched),
        tuple(name for name in names if name not in matched),
    )


def _list_some(kind: str, shown: Sequence[str], of: Sequence[str] | None = None) -> list[str]:
    total = len(shown if of is None else of)
    if not total:
        return []
    hidden = total - min(total, SHOWN)
    tail = [f"    ... and {hidden} more"] if hidden else []
    return [f"  {kind} ({total}):", *(f"    {line}" for line in shown[:SHOWN]), *tail]
