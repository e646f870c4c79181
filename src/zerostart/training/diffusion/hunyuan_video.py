"""HunyuanVideo: text to video."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import ClassVar

import torch
from torch import nn

from zerostart.errors import ConfigError
from zerostart.training.diffusion.encoder import Encoded, Encoder, VideoEncoder
from zerostart.training.diffusion.family import Conditions, Family, Tensors


class HunyuanVideoEncoder(VideoEncoder):
    """``latents`` [C, F, H, W]; ``prompt_embeds`` of the text model, with the ``prompt_attention_mask``.

    The text is put into the pipeline's template, of which nothing is kept. ``pooled_prompt_embeds`` [D] are
    of CLIP.
    """

    patch: ClassVar[int] = 2

    def prompt(self, text: str) -> Encoded:
        embeds, pooled, mask = self.pipe.encode_prompt(text, **self.text)
        return {
            "prompt_embeds": embeds[0],
            "pooled_prompt_embeds": pooled[0],
            "prompt_attention_mask": mask[0],
        }

    def normalised(self, latents: torch.Tensor) -> torch.Tensor:
        # No mean is taken off: the pipeline decodes `latents / scaling_factor`.
        return latents * float(self.pipe.vae.config.scaling_factor)


class HunyuanVideo(Family):
    """Latents are [C, F, H, W]; a timestep goes from 0 to 1000, and so many times is guidance counted."""

    name: ClassVar[str] = "hunyuan-video"
    unit: ClassVar[float] = 1000.0
    classes: ClassVar[frozenset[str]] = frozenset({"HunyuanVideoTransformer3DModel"})
    encoders: ClassVar[Mapping[str, type[Encoder]]] = {"HunyuanVideoPipeline": HunyuanVideoEncoder}
    shift: ClassVar[float] = 7.0
    keys: ClassVar[frozenset[str]] = frozenset(
        {"prompt_embeds", "pooled_prompt_embeds", "prompt_attention_mask"}
    )
    required: ClassVar[frozenset[str]] = keys

    def tokens(self, shape: Sequence[int]) -> int:
        """By the patches of the transformer."""
        return prod(size // patch for size, patch in zip(shape[1:], self._patch, strict=True))

    def check(self, item: Tensors) -> None:
        """Channels and sides as the transformer takes them, of text to video. Raises ConfigError."""
        if (kind := self.config.get("image_condition_type")) is not None:
            raise ConfigError(
                f"{self.name} trains text to video, and this transformer starts from pictures "
                f"(image_condition_type {kind})"
            )
        channels, *sizes = item["latents"].shape
        if channels != (wanted := self.config.get("in_channels", 16)):
            raise ConfigError(
                f"examples have latents of {channels} channels, but the transformer takes {wanted}: they "
                "were encoded for another model"
            )
        if any(size % patch for size, patch in zip(sizes, self._patch, strict=True)):
            raise ConfigError(
                f"latents of {sizes} (frames, height, width) cannot be cut into patches of "
                f"{list(self._patch)}: make each a multiple"
            )

    @property
    def _patch(self) -> tuple[int, ...]:
        # In the order of the latents' axes: frames, rows, columns.
        across = self.config.get("patch_size", 2)
        return self.config.get("patch_size_t", 1), across, across

    def velocity(
        self, model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions
    ) -> torch.Tensor:
        # In the dtype of the latents before it is multiplied, as the pipeline rounds it.
        strength = torch.full_like(t, self.guidance, dtype=latents.dtype) * self.unit
        predicted: torch.Tensor = model(
            hidden_states=latents,
            timestep=t * self.unit,
            encoder_hidden_states=conditions["prompt_embeds"],
            encoder_attention_mask=conditions["prompt_attention_mask"],
            pooled_projections=conditions["pooled_prompt_embeds"],
            guidance=strength if self.config.get("guidance_embeds", True) else None,
            return_dict=False,
        )[0]
        return predicted
