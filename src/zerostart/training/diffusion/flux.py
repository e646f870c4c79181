"""FLUX.1, and Kontext, which starts from a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from zerostart.training.diffusion.encoder import Encoded, Encoder, Example
from zerostart.training.diffusion.family import Conditions, Packed, grid_positions, linear_shift, shift_times


class FluxEncoder(Encoder):
    """Encodes ``latents`` [C, H, W], ``prompt_embeds`` of T5, ``pooled_prompt_embeds`` [D] of CLIP."""

    def encode(self, example: Example, generator: torch.Generator) -> Encoded:
        latents = self.normalise(self.target_latents(self.pixels(example["image"]), generator))
        return {**self.prompt(example["prompt"]), "latents": latents[0]}

    def prompt(self, text: str) -> Encoded:
        embeds, pooled, _ = self.pipe.encode_prompt(text, **self.text)
        return {"prompt_embeds": embeds[0], "pooled_prompt_embeds": pooled[0]}

    def normalise(self, latents: torch.Tensor) -> torch.Tensor:
        """Normalise latents for the transformer."""
        config = self.pipe.vae.config
        scaled: torch.Tensor = (latents - config.shift_factor) * config.scaling_factor
        return scaled


class FluxKontextEncoder(FluxEncoder):
    """Adds ``image_latents.0`` [C, H', W'] of the picture that is edited."""

    takes: ClassVar[frozenset[str]] = frozenset({"image", "edit_image"})
    needs: ClassVar[tuple[str, ...]] = ("image", "edit_image")
    single: ClassVar[frozenset[str]] = frozenset({"edit_image"})

    def encode(self, example: Example, generator: torch.Generator) -> Encoded:
        encoded = super().encode(example, generator)
        latents = self.normalise(self.condition_latents(self.pixels(example["edit_image"][0])))
        return {**encoded, "image_latents.0": latents[0]}


class Flux(Packed):
    """FLUX.1: latents [C, H, W]; time from 0 to 1."""

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
        """Return the shift of the released pipelines' scheduler."""
        # `base_image_seq_len`, `max_image_seq_len`, `base_shift` and `max_shift` of the scheduler.
        return linear_shift(tokens, 256, 4096, 0.5, 1.15)

    def schedule(self, shift: float) -> torch.Tensor:
        # DiffSynth's sigma_min of FLUX.1 is the last of the 1000 times before the shift.
        return shift_times(torch.linspace(1.0, 0.003 / 1.002, 1000, device="cpu"), shift)

    def model_inputs(self, pictures: Sequence[torch.Tensor], conditions: Conditions) -> dict[str, Any]:
        text = conditions["prompt_embeds"]
        return {
            "pooled_projections": conditions["pooled_prompt_embeds"],
            "txt_ids": torch.zeros(text.shape[1], 3, dtype=torch.int64, device=text.device),
            "img_ids": torch.cat([grid_positions(one, number, 2) for number, one in enumerate(pictures)]),
        }
