"""Z-Image."""

from __future__ import annotations

import torch

from zerostart.training.diffusion.encoder import Encoded, Encoder, Example


class ZImage(Encoder):
    """``latents`` [C, H, W] and ``prompt_embeds``, as long as the text is."""

    def encode(self, example: Example, generator: torch.Generator) -> Encoded:
        """See ``Encoder``."""
        config = self.pipe.vae.config
        latents = self.drawn(self.pixels(example["image"]), generator)
        normalised = (latents - config.shift_factor) * config.scaling_factor
        return {**self.prompt(example["prompt"]), "latents": normalised[0]}

    def prompt(self, text: str) -> Encoded:
        """See ``Encoder``."""
        (embeds,), _ = self.pipe.encode_prompt(text, do_classifier_free_guidance=False, **self.text)
        return {"prompt_embeds": embeds}
