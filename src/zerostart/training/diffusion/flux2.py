"""FLUX.2 dev and klein, with reference pictures."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from typing import ClassVar

import torch
from torch import nn

from zerostart.training.diffusion.family import Conditions, Family

_STEPS = 50  # of the released pipelines, by whose number their shift goes
_APART = 10  # from one picture to the next, in places


class Flux2(Family):
    """Latents are [C, H, W] as the transformer has them, patches of 2 by 2 already in C; time from 0 to 1."""

    name: ClassVar[str] = "flux2"
    classes: ClassVar[frozenset[str]] = frozenset({"Flux2Transformer2DModel"})
    shift: ClassVar[float] = exp(0.8)
    most_images: ClassVar[int] = 16

    def tokens(self, shape: Sequence[int]) -> int:
        """One latent each."""
        return shape[-2] * shape[-1]

    def shift_at(self, tokens: int) -> float:
        """As diffusers' pipeline finds it (``compute_empirical_mu``)."""
        from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

        return exp(compute_empirical_mu(tokens, _STEPS))

    def velocity(
        self,
        model: nn.Module,
        latents: torch.Tensor,
        t: torch.Tensor,
        conditions: Conditions,
        guidance: float,
    ) -> torch.Tensor:
        """See ``Family``."""
        images = self.images(conditions)
        text = conditions["prompt_embeds"]
        pictures = [latents, *images]
        places = torch.cat([_places(one, _APART * number) for number, one in enumerate(pictures)])
        words = torch.zeros(text.shape[1], 4, dtype=torch.int64, device=text.device)
        words[:, 3] = torch.arange(text.shape[1], device=text.device)
        told = torch.full_like(t, guidance) if self.config.get("guidance_embeds", True) else None
        predicted: torch.Tensor = model(
            hidden_states=torch.cat([one.flatten(2).transpose(1, 2) for one in pictures], dim=1),
            timestep=t,
            guidance=told,
            encoder_hidden_states=text,
            txt_ids=words.expand(len(latents), -1, -1),
            img_ids=places.expand(len(latents), -1, -1),
            return_dict=False,
        )[0]
        own = predicted[:, : self.tokens(latents.shape)]
        return own.transpose(1, 2).reshape(latents.shape)


def _places(latents: torch.Tensor, number: int) -> torch.Tensor:
    """The place of each token, [tokens, 4]: which picture, row, column, and 0."""
    rows, columns = (torch.arange(size, device=latents.device) for size in latents.shape[-2:])
    grid = torch.cartesian_prod(rows, columns)
    one = torch.full_like(grid[:, :1], number)
    return torch.cat([one, grid, torch.zeros_like(one)], dim=1)
