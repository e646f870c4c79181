"""Families by their names, and by the classes of their transformers."""

from __future__ import annotations

from zerostart.errors import ConfigError
from zerostart.training.diffusion.family import Family
from zerostart.training.diffusion.flux import Flux
from zerostart.training.diffusion.flux2 import Flux2
from zerostart.training.diffusion.qwen_image import QwenImage
from zerostart.training.diffusion.wan import Wan
from zerostart.training.diffusion.z_image import ZImage

FAMILIES: dict[str, type[Family]] = {kind.name: kind for kind in (Wan, QwenImage, Flux, Flux2, ZImage)}


def family_of(transformer: str, chosen: str | None = None) -> type[Family]:
    """The family of the class ``transformer`` of diffusers, or, where it is of none, the ``chosen`` one.

    Raises ConfigError where it is of none, or of another one.
    """
    for family in FAMILIES.values():
        if transformer in family.classes:
            if chosen not in (None, family.name):
                raise ConfigError(
                    f"task.family {chosen}: {transformer} is of the family {family.name}; leave it out"
                )
            return family
    if chosen is not None:
        return FAMILIES[chosen]
    known = ", ".join(sorted(name for family in FAMILIES.values() for name in family.classes))
    raise ConfigError(f"{transformer} belongs to no family that flow-matching knows; known are {known}")
