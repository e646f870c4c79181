"""Qwen-Image, and its editions that start from pictures."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from typing import Any, ClassVar

import torch

from zerostart.training.diffusion.family import Conditions, Tensors, linear_shift
from zerostart.training.diffusion.packed import Packed

_TERMINAL = 0.02  # the last time of DiffSynth's schedule


class QwenImage(Packed):
    """Latents are [C, H, W], tokens of 2 by 2; time goes from 0 to 1. Texts are masked."""

    name: ClassVar[str] = "qwen-image"
    classes: ClassVar[frozenset[str]] = frozenset({"QwenImageTransformer2DModel"})
    shift: ClassVar[float] = exp(0.8)
    keys: ClassVar[frozenset[str]] = frozenset({"prompt_embeds", "prompt_embeds_mask"})
    most_images: ClassVar[int] = 16
    masked: ClassVar[bool] = True

    def shift_at(self, tokens: int) -> float:
        """As the scheduler of the released pipelines has it."""
        return linear_shift(tokens, 256, 8192, 0.5, 0.9)

    def schedule(self, shift: float) -> torch.Tensor:
        """Stretched to its last time."""
        times = super().schedule(shift)
        return 1 - (1 - times) * (1 - _TERMINAL) / (1 - times[-1])

    def conditions(self, items: Sequence[Tensors]) -> Conditions:
        """With a mask wherever texts are padded, or one of them has one."""
        lengths = {len(item["prompt_embeds"]) for item in items if "prompt_embeds" in item}
        if len(lengths) > 1 or any("prompt_embeds_mask" in item for item in items):
            items = [{"prompt_embeds_mask": _whole(item), **item} for item in items]
        return super().conditions(items)

    def further(self, pictures: Sequence[torch.Tensor], conditions: Conditions) -> dict[str, Any]:
        """See ``Packed``."""
        sides = [(1, one.shape[-2] // 2, one.shape[-1] // 2) for one in pictures]
        return {
            "encoder_hidden_states_mask": conditions.get("prompt_embeds_mask"),
            "img_shapes": [sides] * len(pictures[0]),
        }


def _whole(item: Tensors) -> torch.Tensor:
    return torch.ones(len(item["prompt_embeds"]), dtype=torch.int64, device=item["prompt_embeds"].device)
