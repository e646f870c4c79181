"""The recipe of one parameter, and the recipes of a model."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from zerostart.geometry import Piece
from zerostart.recipe.computed import Computed
from zerostart.recipe.coverage import Coverage


@dataclass(frozen=True, slots=True)
class Target:
    """What the model expects under a state-dict name: the unsharded shape and the final dtype.

    With ``as_stored`` a floating tensor takes instead the dtype in which the checkpoint has it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    buffer: bool = False
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
