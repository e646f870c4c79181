"""Families by their names, and by the classes of their transformers."""

from __future__ import annotations

from zerostart.errors import ConfigError
from zerostart.training.families.base import Family
from zerostart.training.families.flux import Flux
from zerostart.training.families.flux2 import Flux2
from zerostart.training.families.qwen_image import QwenImage
from zerostart.training.families.wan import Wan
from zerostart.training.families.z_image import ZImage

__all__ = ["FAMILIES", "family_of"]

FAMILIES: dict[str, type[Family]] = {kind.name: kind for kind in (Wan, QwenImage, Flux, Flux2, ZImage)}


def family_of(transformer: str) -> type[Family]:
    """The family of the class ``transformer`` of diffusers. Raises ConfigError where it is of none."""
    for family in FAMILIES.values():
        if transformer in family.classes:
            return family
    known = ", ".join(sorted(name for family in FAMILIES.values() for name in family.classes))
    raise ConfigError(f"{transformer} is of no family that flow-matching knows; it knows {known}")
