"""The recipe of one parameter, and the recipes of a model."""

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
    """What the model expects under a state-dict name."""

    name: str
    #: Unsharded.
    shape: tuple[int, ...]
    #: The final one.
    dtype: torch.dtype
    buffer: bool = False
    #: A floating tensor takes instead the dtype in which the checkpoint has it.
    as_stored: bool = False


@dataclass(frozen=True, slots=True)
class Recipe:
    """Where each element of ``target`` comes from: pieces that tile its shape.

    ``converted`` tells a recipe that a conversion made from one that takes a tensor as it is stored.
    """

    target: Target
    pieces: tuple[Piece, ...]
    converted: bool = False

    @property
    def computed(self) -> bool:
        """Whether any of it is calculated, and not only moved."""
        return any(isinstance(source, Computed) for piece in self.pieces for source in piece.source)

    @property
    def computed_whole(self) -> bool:
        """Whether calculating it needs whole tensors, which no chunk bounds."""
        return any(
            isinstance(source, Computed) and source.whole for piece in self.pieces for source in piece.source
        )


@dataclass(frozen=True)
class Recipes:
    """Recipes by the target's name, in the order of the model's state dict, and what they leave open.

    ``conversions`` are the library's own objects that matched, for its way back at saving.
    """

    by_name: dict[str, Recipe]
    coverage: Coverage
    conversions: tuple[object, ...] = field(default=())
    #: Of targets that are filled in part, how many elements are not: their recipes do not tile the shape.
    partial: dict[str, int] = field(default_factory=dict)

    @property
    def converted(self) -> tuple[str, ...]:
        """Names of the targets that a conversion filled."""
        return tuple(name for name, recipe in self.by_name.items() if recipe.converted)

    @property
    def computed(self) -> tuple[str, ...]:
        """Names of the targets that are calculated."""
        return tuple(name for name, recipe in self.by_name.items() if recipe.computed)

    @property
    def computed_whole(self) -> tuple[str, ...]:
        """Names of the targets that are calculated from whole tensors."""
        return tuple(name for name, recipe in self.by_name.items() if recipe.computed_whole)


Shape = tuple[int, ...]
#: How many names of a kind an error message lists before it counts the rest.
SHOWN = 8


@dataclass(frozen=True)
class Coverage:
    """Names left over on either side of the join of checkpoint and model."""

    #: Names of the model that the checkpoint lacks.
    missing: tuple[str, ...] = ()
    #: Names of the checkpoint that nothing in the model takes.
    unexpected: tuple[str, ...] = ()
    #: By name, the shape in the checkpoint after conversion and that in the model.
    mismatched: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)
    #: Missing or unexpected names that the model itself declares ignorable.
    ignored: tuple[str, ...] = ()

    def ignoring(self, missing: Iterable[str], unexpected: Iterable[str]) -> Coverage:
        """Without the names that match the model's own patterns (regular expressions, searched)."""
        lost, kept_missing = _partition(self.missing, missing)
        extra, kept_unexpected = _partition(self.unexpected, unexpected)
        return Coverage(kept_missing, kept_unexpected, self.mismatched, (*self.ignored, *lost, *extra))

    def check(self, source: str, model: str, strict: bool, converted: bool = False) -> None:
        """Raise CoverageError if anything is left open that ``strict`` forbids; a mismatch always raises.

        ``converted``: the names and shapes of the checkpoint are those that a converter of the caller's gave.
        """
        if not self.mismatched and not (strict and (self.missing or self.unexpected)):
            return
        after = ", as the converter gives it," if converted else ""
        lines = [f"{source}{after} does not match {model}:"]
        shapes = [
            f"{name} is {list(have)} in the checkpoint and {list(want)} in the model"
            for name, (have, want) in self.mismatched.items()
        ]
        lines += _listed("mismatched", shapes)
        if strict:
            lines += _listed(
                "missing", [self._with_nearest(name) for name in self.missing[:SHOWN]], self.missing
            )
            lines += _listed("unexpected", self.unexpected[:SHOWN], self.unexpected)
        lines.append(self._remedy(converted))
        raise CoverageError(lines, self.missing, self.unexpected, self.mismatched)

    def _with_nearest(self, name: str) -> str:
        # Bounded: the search takes a time that grows with both lists, and a message is all that it is for.
        close = get_close_matches(name, self.unexpected[:5000], n=1, cutoff=0.75)
        return f"{name} (the checkpoint has {close[0]})" if close else name

    def _remedy(self, converted: bool) -> str:
        lenient = ", or pass strict=False to initialise what is missing and to ignore what is unexpected."
        if converted:
            rest = "." if self.mismatched else lenient
            return f"What the converter returns has to have the model's names and shapes{rest}"
        if self.mismatched:
            return (
                "Shapes must agree: check that the model's configuration is the one of this checkpoint, "
                "or pass a converter."
            )
        return f"Check that the checkpoint is of this architecture, pass a converter{lenient}"


def _partition(names: Sequence[str], patterns: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names that a pattern matches, and the others."""
    # Each by itself: flags and references to groups do not survive being joined.
    compiled = [re.compile(pattern) for pattern in patterns]
    matched = {name for name in names if any(pattern.search(name) for pattern in compiled)}
    return (
        tuple(name for name in names if name in matched),
        tuple(name for name in names if name not in matched),
    )


def _listed(kind: str, shown: Sequence[str], of: Sequence[str] | None = None) -> list[str]:
    total = len(shown if of is None else of)
    if not total:
        return []
    rest = total - min(total, SHOWN)
    tail = [f"    ... and {rest} more"] if rest else []
    return [f"  {kind} ({total}):", *(f"    {line}" for line in shown[:SHOWN]), *tail]
