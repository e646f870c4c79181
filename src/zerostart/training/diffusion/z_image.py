"""Z-Image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from zerostart.training.diffusion.family import Conditions, Family


class ZImage(Family):
    """Latents are [C, H, W]. Time goes the other way, from 0 (noise) to 1, and so does the velocity.

    The transformer takes lists, so that texts may differ in length.
    """

    name: ClassVar[str] = "z-image"
    classes: ClassVar[frozenset[str]] = frozenset({"ZImageTransformer2DModel"})
    shift: ClassVar[float] = 3.0

    @property
    def hidden_size(self) -> int | None:
        """The width of the transformer."""
        size: int | None = self.config.get("dim")
        return size

    def tokens(self, shape: Sequence[int]) -> int:
        """2 by 2 latents each."""
        return shape[-2] // 2 * (shape[-1] // 2)

    def _joined(self, name: str, parts: list[torch.Tensor]) -> Any:
        return parts if name == "prompt_embeds" else super()._joined(name, parts)

    def velocity(
        self,
        model: nn.Module,
        latents: torch.Tensor,
        t: torch.Tensor,
        conditions: Conditions,
        guidance: float,
    ) -> torch.Tensor:
        """See ``Family``; guidance is not told."""
        predicted = model(
            list(latents.unsqueeze(2).unbind(0)), 1 - t, list(conditions["prompt_embeds"]), return_dict=False
        )[0]
        return -torch.stack(list(predicted)).squeeze(2)
