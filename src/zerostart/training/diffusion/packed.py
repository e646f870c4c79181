"""Families whose transformers take latents as packed tokens of 2 by 2, and further pictures after them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from zerostart.errors import ConfigError
from zerostart.training.diffusion.family import Conditions, Family, Tensors


class Packed(Family):
    """Latents are [C, H, W], with even sides."""

    def tokens(self, shape: Sequence[int]) -> int:
        """2 by 2 latents each."""
        return shape[-2] // 2 * (shape[-1] // 2)

    def check(self, item: Tensors) -> None:
        """Sides have to be even. Raises ConfigError."""
        for name, value in item.items():
            if name == "latents" or name.startswith("image_latents."):
                height, width = value.shape[-2:]
                if height % 2 or width % 2:
                    raise ConfigError(
                        f"{name} of {height} by {width} cannot be cut into tokens of 2 by 2: "
                        "make both sides even"
                    )

    def velocity(
        self,
        model: nn.Module,
        latents: torch.Tensor,
        t: torch.Tensor,
        conditions: Conditions,
        guidance: float,
    ) -> torch.Tensor:
        """See ``Family``."""
        pictures = [latents, *self.images(conditions)]
        predicted: torch.Tensor = model(
            hidden_states=torch.cat([_packed(one) for one in pictures], dim=1),
            timestep=t,
            guidance=torch.full_like(t, guidance) if self.config.get("guidance_embeds") else None,
            encoder_hidden_states=conditions["prompt_embeds"],
            return_dict=False,
            **self.further(pictures, conditions),
        )[0]
        return _unpacked(predicted[:, : self.tokens(latents.shape)], *latents.shape[-2:])

    @abstractmethod
    def further(self, pictures: Sequence[torch.Tensor], conditions: Conditions) -> dict[str, Any]:
        """What else the transformer takes; ``pictures``, [batch, C, H, W], begin with the latents."""


def _packed(latents: torch.Tensor) -> torch.Tensor:
    """[batch, C, H, W] as tokens of 2 by 2: [batch, H/2 * W/2, 4 C]."""
    batch, channels, height, width = latents.shape
    cut = latents.reshape(batch, channels, height // 2, 2, width // 2, 2)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(batch, height // 2 * (width // 2), channels * 4)


def _unpacked(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The reverse of ``_packed`` for latents of ``height`` by ``width``."""
    batch, _, channels = tokens.shape
    cut = tokens.reshape(batch, height // 2, width // 2, channels // 4, 2, 2)
    return cut.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels // 4, height, width)
