"""Z-Image: text to picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from zerostart.training.diffusion.encoder import Encoded, Encoder, Example
from zerostart.training.diffusion.family import Conditions, Family


class ZImageEncoder(Encoder):
    """Encodes ``latents`` [C, H, W], and ``prompt_embeds`` of the text's length."""

    def encode(self, example: Example, generator: torch.Generator) -> Encoded:
        config = self.pipe.vae.config
        latents = self.target_latents(self.pixels(example["image"]), generator)
        scaled = (latents - config.shift_factor) * config.scaling_factor
        return {**self.prompt(example["prompt"]), "latents": scaled[0]}

    def prompt(self, text: str) -> Encoded:
        # A list with one unpadded tensor for each text.
        (embeds,), _ = self.pipe.encode_prompt(text, do_classifier_free_guidance=False, **self.text)
        return {"prompt_embeds": embeds}


class ZImage(Family):
    """Z-Image: latents [C, H, W]; its time and velocity run from noise (0) to data (1).

    The transformer takes lists, so that texts may differ in length.
    """

    name: ClassVar[str] = "z-image"
    classes: ClassVar[frozenset[str]] = frozenset({"ZImageTransformer2DModel"})
    encoders: ClassVar[Mapping[str, type[Encoder]]] = {
        "ZImagePipeline": ZImageEncoder,
    }
    shift: ClassVar[float] = 3.0

    patch = (2, 2)

    @property
    def hidden_size(self) -> int | None:
        """Width of the transformer."""
        size: int | None = self.config.get("dim")
        return size

    def _stack(self, name: str, parts: list[torch.Tensor]) -> Any:
        return parts if name == "prompt_embeds" else super()._stack(name, parts)

    def velocity(
        self, model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions
    ) -> torch.Tensor:
        # Each picture is [C, 1, H, W], a video of one frame.
        predicted = model(
            list(latents.unsqueeze(2).unbind(0)), 1 - t, list(conditions["prompt_embeds"]), return_dict=False
        )[0]
        # It predicts the velocity from noise to data.
        return -torch.stack(list(predicted)).squeeze(2)
