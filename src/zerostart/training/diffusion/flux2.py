"""FLUX.2 dev and klein, with reference pictures or without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp
from typing import ClassVar

import torch
from torch import nn

from zerostart.training.diffusion.encoder import Encoded, Encoder, Example
from zerostart.training.diffusion.family import Conditions, Family


class Flux2Encoder(Encoder):
    """``latents`` [4 C, H / 2, W / 2], in patches as they are normalised, and ``prompt_embeds``.

    Pictures to start from (``edit_image`` or ``reference_image``, of any number) become ``image_latents.0``
    and so on.
    """

    takes: ClassVar[frozenset[str]] = frozenset({"image", "edit_image", "reference_image"})

    def encode(self, example: Example, generator: torch.Generator) -> Encoded:
        latents = self.normalised(self.target_latents(self.pixels(example["image"]), generator))
        found = {**self.prompt(example["prompt"]), "latents": latents[0]}
        # One order for both columns: the model knows pictures by their numbers, and samples pass them
        # likewise.
        given = [*example.get("edit_image", ()), *example.get("reference_image", ())]
        for number, picture in enumerate(given):
            latents = self.normalised(self.condition_latents(self.pixels(picture)))
            found[f"image_latents.{number}"] = latents[0]
        return found

    def prompt(self, text: str) -> Encoded:
        embeds, _ = self.pipe.encode_prompt(text, **self.text)
        return {"prompt_embeds": embeds[0]}

    def normalised(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents as the transformer sees them: patches, by the autoencoder's running mean and variance."""
        vae = self.pipe.vae
        # Statistics are of the patches' channels (4 C): the cut into patches comes before the normalisation.
        patches = _patches(latents)
        mean = vae.bn.running_mean.view(1, -1, 1, 1).to(patches.device, patches.dtype)
        variance = vae.bn.running_var.view(1, -1, 1, 1)
        scale = torch.sqrt(variance + vae.config.batch_norm_eps).to(patches.device, patches.dtype)
        found: torch.Tensor = (patches - mean) / scale
        return found


def _patches(latents: torch.Tensor) -> torch.Tensor:
    """[1, C, H, W] as [1, 4 C, H / 2, W / 2]."""
    batch, channels, height, width = latents.shape
    # Channel, row and column within the patch, as `_patchify_latents` of the pipeline has them.
    parts = latents.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 1, 3, 5, 2, 4)
    return parts.reshape(batch, channels * 4, height // 2, width // 2)


_STEPS = 50  # of the released pipelines, by whose number their shift goes
_APART = 10  # positions from one picture to the next


class Flux2(Family):
    """Latents are [C, H, W] as the transformer has them, patches of 2 by 2 already in C; time from 0 to 1."""

    name: ClassVar[str] = "flux2"
    classes: ClassVar[frozenset[str]] = frozenset({"Flux2Transformer2DModel"})
    encoders: ClassVar[Mapping[str, type[Encoder]]] = {
        "Flux2Pipeline": Flux2Encoder,
        "Flux2KleinPipeline": Flux2Encoder,
    }
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
        self, model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions
    ) -> torch.Tensor:
        images = self.images(conditions)
        text = conditions["prompt_embeds"]
        pictures = [latents, *images]
        # The first axis keeps pictures apart: 0 is the one that is drawn, 10, 20 and so on are given ones.
        positions = torch.cat([_positions(one, _APART * number) for number, one in enumerate(pictures)])
        # Words differ on the fourth axis alone, tokens of pictures on the first three.
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
        # Tokens of the given pictures come after the latents' own; what is predicted for them is of no use.
        own = predicted[:, : self.tokens(latents.shape)]
        return own.transpose(1, 2).reshape(latents.shape)


def _positions(latents: torch.Tensor, number: int) -> torch.Tensor:
    """The position of each token, [tokens, 4]: which picture, row, column, and 0."""
    rows, columns = (torch.arange(size, device=latents.device) for size in latents.shape[-2:])
    grid = torch.cartesian_prod(rows, columns)
    one = torch.full_like(grid[:, :1], number)
    return torch.cat([one, grid, torch.zeros_like(one)], dim=1)
