"""FLUX.2 dev and klein, with reference pictures or without."""

from __future__ import annotations

from collections.abc import Mapping
from math import exp
from typing import ClassVar

import torch
from torch import nn

from zerostart.training.diffusion.encoder import Encoded, Encoder, Example
from zerostart.training.diffusion.family import Conditions, Family, grid_positions


class Flux2Encoder(Encoder):
    """Encodes ``latents`` [4 C, H / 2, W / 2] (normalised patches) and ``prompt_embeds``.

    Pictures to start from (``edit_image``, then ``reference_image``) become ``image_latents.0`` and so on.
    """

    takes: ClassVar[frozenset[str]] = frozenset({"image", "edit_image", "reference_image"})

    def encode(self, example: Example, generator: torch.Generator) -> Encoded:
        latents = self.normalise(self.target_latents(self.pixels(example["image"]), generator))
        encoded = {**self.prompt(example["prompt"]), "latents": latents[0]}
        # The model distinguishes pictures by their numbers.
        pictures = [*example.get("edit_image", ()), *example.get("reference_image", ())]
        for number, picture in enumerate(pictures):
            latents = self.normalise(self.condition_latents(self.pixels(picture)))
            encoded[f"image_latents.{number}"] = latents[0]
        return encoded

    def prompt(self, text: str) -> Encoded:
        embeds, _ = self.pipe.encode_prompt(text, **self.text)
        return {"prompt_embeds": embeds[0]}

    def normalise(self, latents: torch.Tensor) -> torch.Tensor:
        """Cut latents into patches and normalise them by the autoencoder's running statistics."""
        vae = self.pipe.vae
        patches = _patches(latents)
        mean = vae.bn.running_mean.view(1, -1, 1, 1).to(patches.device, patches.dtype)
        variance = vae.bn.running_var.view(1, -1, 1, 1)
        scale = torch.sqrt(variance + vae.config.batch_norm_eps).to(patches.device, patches.dtype)
        scaled: torch.Tensor = (patches - mean) / scale
        return scaled


def _patches(latents: torch.Tensor) -> torch.Tensor:
    """Convert [1, C, H, W] to patches [1, 4 C, H / 2, W / 2]."""
    batch, channels, height, width = latents.shape
    # Channel, row and column within the patch, as `_patchify_latents` of the pipeline has them.
    parts = latents.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 1, 3, 5, 2, 4)
    return parts.reshape(batch, channels * 4, height // 2, width // 2)


_STEPS = 50  # inference steps of the released pipelines, which determine their shift
_PICTURE_OFFSET = 10  # positions from one picture to the next


class Flux2(Family):
    """FLUX.2: latents [C, H, W], with patches in C; time from 0 to 1."""

    name: ClassVar[str] = "flux2"
    classes: ClassVar[frozenset[str]] = frozenset({"Flux2Transformer2DModel"})
    encoders: ClassVar[Mapping[str, type[Encoder]]] = {
        "Flux2Pipeline": Flux2Encoder,
        "Flux2KleinPipeline": Flux2Encoder,
    }
    shift: ClassVar[float] = exp(0.8)
    most_images: ClassVar[int] = 16

    def shift_at(self, tokens: int) -> float:
        """Return the shift of diffusers' pipeline (``compute_empirical_mu``)."""
        from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

        return exp(compute_empirical_mu(tokens, _STEPS))

    def velocity(
        self, model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions
    ) -> torch.Tensor:
        text = conditions["prompt_embeds"]
        pictures = [latents, *self.images(conditions)]
        # The first axis separates pictures: 0 is drawn, 10, 20 and so on are inputs.
        places = torch.cat(
            [grid_positions(one, _PICTURE_OFFSET * number) for number, one in enumerate(pictures)]
        )
        positions = torch.cat([places, torch.zeros_like(places[:, :1])], dim=1)
        # Words have positions only on the fourth axis, tokens of pictures on the first three.
        words = torch.zeros(text.shape[1], 4, dtype=torch.int64, device=text.device)
        words[:, 3] = torch.arange(text.shape[1], device=text.device)
        strength = torch.full_like(t, self.guidance) if self.config.get("guidance_embeds", True) else None
        predicted: torch.Tensor = model(
            hidden_states=torch.cat([one.flatten(2).transpose(1, 2) for one in pictures], dim=1),
            timestep=t,
            guidance=strength,
            encoder_hidden_states=text,
            txt_ids=words.expand(len(latents), -1, -1),
            img_ids=positions.expand(len(latents), -1, -1),
            return_dict=False,
        )[0]
        # Tokens of the latents come first; the others are dropped.
        own = predicted[:, : self.tokens(latents.shape[1:])]
        return own.transpose(1, 2).reshape(latents.shape)
