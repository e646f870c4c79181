"""Pixels as the parts of a diffusers pipeline take them."""

from __future__ import annotations

from typing import Any

import torch

from zerostart.training.media.files import needed

__all__ = ["as_float", "as_picture"]


def as_float(pixels: torch.Tensor) -> torch.Tensor:
    """uint8 of 0 to 255, of any shape, as float32 of -1 to 1: bit for bit as diffusers' image processors do."""
    return 2.0 * (pixels.to(torch.float32) / 255.0) - 1.0


def as_picture(pixels: torch.Tensor) -> Any:
    """uint8 [3, H, W] as a Pillow image of mode RGB. Raises :class:`ConfigError` where Pillow is absent."""
    return needed("PIL.Image").fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
