"""Z-Image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from zerostart.training.diffusion.encoder import Encoded, Encoder, Example
from zerostart.training.diffusion.family import Conditions, Family


class ZImageEncoder(Encoder):
    """``latents`` [C, H, W] and ``prompt_embeds``, as long as the text is."""

    def encode(self, example: Example, generator: torch.Generator) -> Encoded:
        config = self.pipe.vae.config
        latents = self.target_latents(self.pixels(example["image"]), generator)
        # The reverse of the pipeline's `latents / scaling_factor + shift_factor` before it decodes.
        normalised = (latents - config.shift_factor) * config.scaling_factor
        return {**self.prompt(example["prompt"]), "latents": normalised[0]}

    def prompt(self, text: str) -> Encoded:
        # A list with one tensor for each text, already without padding.
        (embeds,), _ = self.pipe.encode_prompt(text, do_classifier_free_guidance=False, **self.text)
        return {"prompt_embeds": embeds}


class ZImage(Family):
    """Latents are [C, H, W]. Time goes the other way, from 0 (noise) to 1, and so does the velocity.

    The transformer takes lists, so that texts may differ in length.
    """

    name: ClassVar[str] = "z-image"
    classes: ClassVar[frozenset[str]] = frozenset({"ZImageTransformer2DModel"})
    encoders: ClassVar[Mapping[str, type[Encoder]]] = {
        "ZImagePipeline": ZImageEncoder,
    }
    shift: ClassVar[float] = 3.0

    @property
    def hidden_size(self) -> int | None:
        """The width of the transformer."""
        size: int | None = self.config.get("dim")
        return size

    def tokens(self, shape: Sequence[int]) -> int:
        """2 by 2 latents each."""
        return shape[-2] // 2 * (shape[-1] // 2)

    def _joined(self, name: str, parts: list[torch.Tensor]) -> Any:
        return parts if name == "prompt_embeds" else super()._joined(name, parts)

    def velocity(
        self, model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions
    ) -> torch.Tensor:
        # Each picture [C, 1, H, W], a video of one frame; the class multiplies its time by 1000 itself.
        predicted = model(
            list(latents.unsqueeze(2).unbind(0)), 1 - t, list(conditions["prompt_embeds"]), return_dict=False
        )[0]
        # It predicts from noise to data; the sign turns that into the velocity of this package.
        return -torch.stack(list(predicted)).squeeze(2)
