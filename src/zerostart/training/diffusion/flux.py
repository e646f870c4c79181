"""FLUX.1, and Kontext, which starts from a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from zerostart.training.diffusion.encoder import Encoded, Encoder, Example
from zerostart.training.diffusion.family import Conditions, Packed, linear_shift, shifted


class FluxEncoder(Encoder):
    """``latents`` [C, H, W], ``prompt_embeds`` of T5 and ``pooled_prompt_embeds`` [D] of CLIP."""

    def encode(self, example: Example, generator: torch.Generator) -> Encoded:
        latents = self.normalised(self.target_latents(self.pixels(example["image"]), generator))
        return {**self.prompt(example["prompt"]), "latents": latents[0]}

    def prompt(self, text: str) -> Encoded:
        # The third are positions of the text, all zero: `model_inputs` makes them for the batch.
        embeds, pooled, _ = self.pipe.encode_prompt(text, **self.text)
        return {"prompt_embeds": embeds[0], "pooled_prompt_embeds": pooled[0]}

    def normalised(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents as the transformer sees them."""
        config = self.pipe.vae.config
        # The pipeline decodes `latents / scaling_factor + shift_factor`; this is the reverse.
        found: torch.Tensor = (latents - config.shift_factor) * config.scaling_factor
        return found


class FluxKontextEncoder(FluxEncoder):
    """Adds ``image_latents.0`` [C, H', W'] of the picture that is edited."""

    takes: ClassVar[frozenset[str]] = frozenset({"image", "edit_image"})
    needs: ClassVar[tuple[str, ...]] = ("image", "edit_image")
    single: ClassVar[frozenset[str]] = frozenset({"edit_image"})

    def encode(self, example: Example, generator: torch.Generator) -> Encoded:
        found = super().encode(example, generator)
        given = self.normalised(self.condition_latents(self.pixels(example["edit_image"][0])))
        return {**found, "image_latents.0": given[0]}


class Flux(Packed):
    """Latents are [C, H, W], tokens of 2 by 2; time goes from 0 to 1."""

    name: ClassVar[str] = "flux"
    classes: ClassVar[frozenset[str]] = frozenset({"FluxTransformer2DModel"})
    encoders: ClassVar[Mapping[str, type[Encoder]]] = {
        "FluxPipeline": FluxEncoder,
        "FluxKontextPipeline": FluxKontextEncoder,
    }
    shift: ClassVar[float] = 3.0
    keys: ClassVar[frozenset[str]] = frozenset({"prompt_embeds", "pooled_prompt_embeds"})
    required: ClassVar[frozenset[str]] = keys
    most_images: ClassVar[int] = 1

    def shift_at(self, tokens: int) -> float:
        """As the scheduler of the released pipelines has it."""
        # `base_image_seq_len`, `max_image_seq_len`, `base_shift` and `max_shift` of the scheduler.
        return linear_shift(tokens, 256, 4096, 0.5, 1.15)

    def schedule(self, shift: float) -> torch.Tensor:
        """With an end of its own."""
        # DiffSynth's sigma_min of FLUX.1 is the last of the 1000 times, and so the end is among them here.
        return shifted(torch.linspace(1.0, 0.003 / 1.002, 1000, device="cpu"), shift)

    def model_inputs(self, pictures: Sequence[torch.Tensor], conditions: Conditions) -> dict[str, Any]:
        text = conditions["prompt_embeds"]
        return {
            "pooled_projections": conditions["pooled_prompt_embeds"],
            # Words have no place in the picture: position 0 on every axis. No batch axis, for all examples
            # are alike.
            "txt_ids": torch.zeros(text.shape[1], 3, dtype=torch.int64, device=text.device),
            "img_ids": torch.cat([_positions(one, number) for number, one in enumerate(pictures)]),
        }


def _positions(latents: torch.Tensor, number: int) -> torch.Tensor:
    """The position of each token, [tokens, 3]: picture, row, column. Integers, which no engine rounds."""
    rows, columns = latents.shape[-2] // 2, latents.shape[-1] // 2
    ranges = (torch.arange(size, device=latents.device) for size in (rows, columns))
    grid = torch.cartesian_prod(*ranges)
    # Picture 0 is the one that is drawn, 1 the one that Kontext starts from; both begin at row and column 0.
    return torch.cat([torch.full_like(grid[:, :1], number), grid], dim=1)
