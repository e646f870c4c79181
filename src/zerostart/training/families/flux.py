"""FLUX.1, and Kontext, which starts from a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from zerostart.training.families.base import (
    Conditions,
    Family,
    linear_shift,
    packed,
    shifted,
    unpacked,
)

__all__ = ["Flux"]


class Flux(Family):
    """Latents are [C, H, W], tokens of 2 by 2; time goes from 0 to 1."""

    name: ClassVar[str] = "flux"
    classes: ClassVar[frozenset[str]] = frozenset({"FluxTransformer2DModel"})
    shift: ClassVar[float] = 3.0
    keys: ClassVar[frozenset[str]] = frozenset({"prompt_embeds", "pooled_prompt_embeds"})
    required: ClassVar[frozenset[str]] = keys
    most_images: ClassVar[int] = 1

    def tokens(self, shape: Sequence[int]) -> int:
        """2 by 2 latents each."""
        return shape[-2] // 2 * (shape[-1] // 2)

    def shift_at(self, tokens: int) -> float:
        """As the scheduler of the released pipelines has it."""
        return linear_shift(tokens, 256, 4096, 0.5, 1.15)

    def schedule(self, shift: float) -> torch.Tensor:
        """With an end of its own."""
        return shifted(torch.linspace(1.0, 0.003 / 1.002, 1000, device="cpu"), shift)

    def velocity(
        self,
        model: nn.Module,
        latents: torch.Tensor,
        t: torch.Tensor,
        conditions: Conditions,
        guidance: float,
    ) -> torch.Tensor:
        """See ``Family``."""
        height, width = latents.shape[-2:]
        images = self.images(conditions)
        text = conditions["prompt_embeds"]
        places = [_places(one, number) for number, one in enumerate((latents, *images))]
        told = torch.full_like(t, guidance) if self.config.get("guidance_embeds") else None
        predicted: torch.Tensor = model(
            hidden_states=torch.cat([packed(one) for one in (latents, *images)], dim=1),
            timestep=t,
            guidance=told,
            pooled_projections=conditions["pooled_prompt_embeds"],
            encoder_hidden_states=text,
            txt_ids=torch.zeros(text.shape[1], 3, dtype=torch.int64, device=text.device),
            img_ids=torch.cat(places),
            return_dict=False,
        )[0]
        return unpacked(predicted[:, : self.tokens(latents.shape)], height, width)


def _places(latents: torch.Tensor, number: int) -> torch.Tensor:
    """The place of each token, [tokens, 3]: which picture, row, column. Integers, which no engine rounds."""
    rows, columns = latents.shape[-2] // 2, latents.shape[-1] // 2
    ranges = (torch.arange(size, device=latents.device) for size in (rows, columns))
    grid = torch.cartesian_prod(*ranges)
    return torch.cat([torch.full_like(grid[:, :1], number), grid], dim=1)
