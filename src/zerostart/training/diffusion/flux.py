"""FLUX.1, and Kontext, which starts from a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from zerostart.training.diffusion.family import Conditions, linear_shift, shifted
from zerostart.training.diffusion.packed import Packed


class Flux(Packed):
    """Latents are [C, H, W], tokens of 2 by 2; time goes from 0 to 1."""

    name: ClassVar[str] = "flux"
    classes: ClassVar[frozenset[str]] = frozenset({"FluxTransformer2DModel"})
    shift: ClassVar[float] = 3.0
    keys: ClassVar[frozenset[str]] = frozenset({"prompt_embeds", "pooled_prompt_embeds"})
    required: ClassVar[frozenset[str]] = keys
    most_images: ClassVar[int] = 1

    def shift_at(self, tokens: int) -> float:
        """As the scheduler of the released pipelines has it."""
        return linear_shift(tokens, 256, 4096, 0.5, 1.15)

    def schedule(self, shift: float) -> torch.Tensor:
        """With an end of its own."""
        return shifted(torch.linspace(1.0, 0.003 / 1.002, 1000, device="cpu"), shift)

    def further(self, pictures: Sequence[torch.Tensor], conditions: Conditions) -> dict[str, Any]:
        """See ``Packed``."""
        text = conditions["prompt_embeds"]
        return {
            "pooled_projections": conditions["pooled_prompt_embeds"],
            "txt_ids": torch.zeros(text.shape[1], 3, dtype=torch.int64, device=text.device),
            "img_ids": torch.cat([_places(one, number) for number, one in enumerate(pictures)]),
        }


def _places(latents: torch.Tensor, number: int) -> torch.Tensor:
    """The place of each token, [tokens, 3]: which picture, row, column. Integers, which no engine rounds."""
    rows, columns = latents.shape[-2] // 2, latents.shape[-1] // 2
    ranges = (torch.arange(size, device=latents.device) for size in (rows, columns))
    grid = torch.cartesian_prod(*ranges)
    return torch.cat([torch.full_like(grid[:, :1], number), grid], dim=1)
