"""HunyuanVideo: text to video."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from zerostart.errors import ConfigError
from zerostart.training.diffusion.encoder import Encoded, Encoder, VideoEncoder
from zerostart.training.diffusion.family import Conditions, Family, Tensors


class HunyuanVideoEncoder(VideoEncoder):
    """Encodes ``latents`` [C, F, H, W] and the text.

    ``prompt_embeds`` and ``prompt_attention_mask`` come from the text model, without the pipeline's template,
    and ``pooled_prompt_embeds`` [D] from CLIP.
    """

    patch: ClassVar[int] = 2

    def prompt(self, text: str) -> Encoded:
        embeds, pooled, mask = self.pipe.encode_prompt(text, **self.text)
        return {
            "prompt_embeds": embeds[0],
            "pooled_prompt_embeds": pooled[0],
            "prompt_attention_mask": mask[0],
        }

    def normalise(self, latents: torch.Tensor) -> torch.Tensor:
        return latents * float(self.pipe.vae.config.scaling_factor)


class HunyuanVideo(Family):
    """HunyuanVideo: latents [C, F, H, W]; timestep and guidance in units of 1 / 1000."""

    name: ClassVar[str] = "hunyuan-video"
    unit: ClassVar[float] = 1000.0
    classes: ClassVar[frozenset[str]] = frozenset({"HunyuanVideoTransformer3DModel"})
    encoders: ClassVar[Mapping[str, type[Encoder]]] = {"HunyuanVideoPipeline": HunyuanVideoEncoder}
    shift: ClassVar[float] = 7.0
    keys: ClassVar[frozenset[str]] = frozenset(
        {"prompt_embeds", "pooled_prompt_embeds", "prompt_attention_mask"}
    )
    required: ClassVar[frozenset[str]] = keys

    def __init__(self, config: Mapping[str, Any], guidance: float = 1.0) -> None:
        super().__init__(config, guidance)
        side = config.get("patch_size", 2)
        self.patch = (config.get("patch_size_t", 1), side, side)

    def check(self, item: Tensors) -> None:
        """Raise ConfigError for other channels, odd sides and image-to-video transformers."""
        if (kind := self.config.get("image_condition_type")) is not None:
            raise ConfigError(
                f"{self.name} trains text to video, and this transformer starts from pictures "
                f"(image_condition_type {kind})"
            )
        channels, *sizes = item["latents"].shape
        self._check_channels(channels, self.config.get("in_channels", 16))
        if any(size % patch for size, patch in zip(sizes, self.patch, strict=True)):
            raise ConfigError(
                f"latents of {sizes} (frames, height, width) cannot be cut into patches of "
                f"{list(self.patch)}: make each a multiple"
            )

    def velocity(
        self, model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions
    ) -> torch.Tensor:
        # The pipeline rounds to the dtype of the latents before it multiplies.
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
