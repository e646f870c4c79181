"""FLUX.2: dev and klein, with reference pictures or without."""

from __future__ import annotations

from typing import ClassVar

import torch

from zerostart.training.diffusion.encoder import Encoded, Encoder, Example


class Flux2(Encoder):
    """``latents`` [4 C, H / 2, W / 2], in patches as they are normalised, and ``prompt_embeds``.

    Pictures to start from (``edit_image`` or ``reference_image``, of any number) become ``image_latents.0``
    and so on.
    """

    takes: ClassVar[frozenset[str]] = frozenset({"image", "edit_image", "reference_image"})

    def encode(self, example: Example, generator: torch.Generator) -> Encoded:
        """See ``Encoder``."""
        latents = self.normalised(self.drawn(self.pixels(example["image"]), generator))
        found = {**self.prompt(example["prompt"]), "latents": latents[0]}
        given = [*example.get("edit_image", ()), *example.get("reference_image", ())]
        for place, picture in enumerate(given):
            found[f"image_latents.{place}"] = self.normalised(self.likeliest(self.pixels(picture)))[0]
        return found

    def prompt(self, text: str) -> Encoded:
        """See ``Encoder``."""
        embeds, _ = self.pipe.encode_prompt(text, **self.text)
        return {"prompt_embeds": embeds[0]}

    def normalised(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents as the transformer sees them: patches, by the autoencoder's running mean and variance."""
        vae = self.pipe.vae
        patches = _patches(latents)
        mean = vae.bn.running_mean.view(1, -1, 1, 1).to(patches.device, patches.dtype)
        variance = vae.bn.running_var.view(1, -1, 1, 1)
        scale = torch.sqrt(variance + vae.config.batch_norm_eps).to(patches.device, patches.dtype)
        found: torch.Tensor = (patches - mean) / scale
        return found


def _patches(latents: torch.Tensor) -> torch.Tensor:
    """[1, C, H, W] as [1, 4 C, H / 2, W / 2]."""
    batch, channels, height, width = latents.shape
    parts = latents.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 1, 3, 5, 2, 4)
    return parts.reshape(batch, channels * 4, height // 2, width // 2)
