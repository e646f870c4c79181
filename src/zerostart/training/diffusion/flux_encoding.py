"""FLUX.1, and Kontext, which starts from a picture."""

from __future__ import annotations

from typing import ClassVar

import torch

from zerostart.training.diffusion.encoder import Encoded, Encoder, Example


class Flux(Encoder):
    """``latents`` [C, H, W], ``prompt_embeds`` of T5 and ``pooled_prompt_embeds`` [D] of CLIP."""

    def encode(self, example: Example, generator: torch.Generator) -> Encoded:
        """See ``Encoder``."""
        latents = self.normalised(self.drawn(self.pixels(example["image"]), generator))
        return {**self.prompt(example["prompt"]), "latents": latents[0]}

    def prompt(self, text: str) -> Encoded:
        """See ``Encoder``."""
        embeds, pooled, _ = self.pipe.encode_prompt(text, **self.text)
        return {"prompt_embeds": embeds[0], "pooled_prompt_embeds": pooled[0]}

    def normalised(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents as the transformer sees them."""
        config = self.pipe.vae.config
        found: torch.Tensor = (latents - config.shift_factor) * config.scaling_factor
        return found


class FluxKontext(Flux):
    """Adds ``image_latents.0`` [C, H', W'] of the picture that is edited."""

    takes: ClassVar[frozenset[str]] = frozenset({"image", "edit_image"})
    needs: ClassVar[tuple[str, ...]] = ("image", "edit_image")
    single: ClassVar[frozenset[str]] = frozenset({"edit_image"})

    def encode(self, example: Example, generator: torch.Generator) -> Encoded:
        """See ``Encoder``."""
        found = super().encode(example, generator)
        given = self.normalised(self.likeliest(self.pixels(example["edit_image"][0])))
        return {**found, "image_latents.0": given[0]}
