"""Wan 2.1 and 2.2: text, picture, first and last frame to video; VACE."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar

import torch
from torch import nn

from zerostart.errors import ConfigError
from zerostart.training.diffusion.family import Conditions, Family, Tensors


class Wan(Family):
    """Latents are [C, F, H, W]; a timestep goes from 0 to 1000.

    ``condition`` is what a transformer with more input channels than the latents have gets beside them (the
    given frames and their mask), or, where it has no more (Wan 2.2 5B), the latents of the first frame, which
    is then put in its place, at time 0, and is no part of the loss. ``image_embeds`` (of two frames one after
    the other) are for transformers that look at pictures (``image_dim``) alone, as in the pipelines.
    """

    name: ClassVar[str] = "wan"
    unit: ClassVar[float] = 1000.0
    classes: ClassVar[frozenset[str]] = frozenset({"WanTransformer3DModel", "WanVACETransformer3DModel"})
    shift: ClassVar[float] = 5.0
    keys: ClassVar[frozenset[str]] = frozenset(
        {"prompt_embeds", "image_embeds", "condition", "control_latents"}
    )

    def tokens(self, shape: Sequence[int]) -> int:
        """By the patches of the transformer."""
        return prod(size // patch for size, patch in zip(shape[1:], self._patch, strict=True))

    def check(self, item: Tensors) -> None:
        """As many channels and frames as the transformer takes; of VACE its controls. Raises ConfigError."""
        if "vace_layers" in self.config and "control_latents" not in item:
            raise ConfigError("an example has no control_latents, which the transformer of VACE needs")
        places = self.config.get("pos_embed_seq_len")
        if places is not None and (found := len(item.get("image_embeds", ()))) != places:
            raise ConfigError(
                f"an example has image_embeds of {found} places, but the transformer takes {places}, those "
                "of a first and a last frame: set cache.last_frame, or name a column last_frame"
            )
        count = len(item["latents"])
        if "condition" in item and count != self._channels:
            count += len(item["condition"])
        if count != self._channels:
            raise ConfigError(
                f"examples give {count} channels (latents, and condition where it is), but the transformer "
                f"takes {self._channels}: they were encoded for another model"
            )

    @property
    def _channels(self) -> int:
        channels: int = self.config.get("in_channels", 16)
        return channels

    @property
    def _patch(self) -> tuple[int, ...]:
        return tuple(self.config.get("patch_size", (1, 2, 2)))

    def velocity(
        self,
        model: nn.Module,
        latents: torch.Tensor,
        t: torch.Tensor,
        conditions: Conditions,
        guidance: float,
    ) -> torch.Tensor:
        """See ``Family``; guidance is not told."""
        given, timestep = latents, t * self.unit
        condition = conditions.get("condition")
        if condition is not None and self._first_frame(latents):
            frames = condition.shape[2]
            given = torch.cat([condition, latents[:, :, frames:]], dim=2)
            timestep = self._after(timestep, latents, frames)
        elif condition is not None:
            given = torch.cat([latents, condition], dim=1)
        more: dict[str, Any] = {}
        image = conditions.get("image_embeds")
        if image is not None and self.config.get("image_dim") is not None:
            if self.config.get("pos_embed_seq_len") is not None:  # which puts two frames together by itself
                image = image.unflatten(1, (2, -1)).flatten(0, 1)
            more["encoder_hidden_states_image"] = image
        if (control := conditions.get("control_latents")) is not None:
            more["control_hidden_states"] = control
        predicted: torch.Tensor = model(
            hidden_states=given,
            timestep=timestep,
            encoder_hidden_states=conditions["prompt_embeds"],
            **more,
            return_dict=False,
        )[0]
        return predicted

    def trained(self, values: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        """All frames but those that are put in."""
        condition = conditions.get("condition")
        if condition is None or not self._first_frame(values):
            return values
        return values[:, :, condition.shape[2] :]

    def _first_frame(self, latents: torch.Tensor) -> bool:
        """Whether the transformer has no channels for what is given beside the latents."""
        return bool(latents.shape[1] == self._channels)

    def _after(self, timestep: torch.Tensor, latents: torch.Tensor, frames: int) -> torch.Tensor:
        """A timestep for each token, [batch, tokens]: 0 in the first ``frames``."""
        each = [size // patch for size, patch in zip(latents.shape[2:], self._patch, strict=True)]
        whole = timestep[:, None, None].expand(len(timestep), each[0], each[1] * each[2]).clone()
        whole[:, : frames // self._patch[0]] = 0
        return whole.flatten(1)
