"""Registry of the families of diffusion models, each in a file of this folder."""

from __future__ import annotations

from zerostart.errors import ConfigError
from zerostart.training.diffusion.encoder import Encoder
from zerostart.training.diffusion.family import Family
from zerostart.training.diffusion.flux import Flux
from zerostart.training.diffusion.flux2 import Flux2
from zerostart.training.diffusion.hunyuan_video import HunyuanVideo
from zerostart.training.diffusion.ltx2 import Ltx2
from zerostart.training.diffusion.qwen_image import QwenImage
from zerostart.training.diffusion.wan import Wan
from zerostart.training.diffusion.z_image import ZImage

FAMILIES: dict[str, type[Family]] = {
    kind.name: kind for kind in (Wan, QwenImage, Flux, Flux2, ZImage, HunyuanVideo, Ltx2)
}


def known_family(transformer: object) -> type[Family] | None:
    """Return the family of diffusers' class ``transformer`` (a name), or None."""
    return next((family for family in FAMILIES.values() if str(transformer) in family.classes), None)


def family_of(transformer: str, chosen: str | None = None) -> type[Family]:
    """Return the family of diffusers' class ``transformer``, or the ``chosen`` one.

    Raises ConfigError for an unknown class without a choice, and for a known class with another choice.
    """
    if (family := known_family(transformer)) is not None:
        if chosen not in (None, family.name):
            raise ConfigError(
                f"task.family {chosen}: {transformer} belongs to the family {family.name}; leave "
                "task.family out"
            )
        return family
    if chosen is not None:
        # Only the user knows whose conventions a derived class has.
        return FAMILIES[chosen]
    names = ", ".join(sorted(name for family in FAMILIES.values() for name in family.classes))
    raise ConfigError(f"{transformer} belongs to no family that flow-matching supports; it supports {names}")


def encoder_class(pipeline: object) -> type[Encoder]:
    """Return the encoder for pipelines of the class ``pipeline`` (a name); raises ConfigError."""
    encoders = {name: encoder for family in FAMILIES.values() for name, encoder in family.encoders.items()}
    if not isinstance(pipeline, str) or pipeline not in encoders:
        raise ConfigError(
            f"pipelines of the class {pipeline!r} have no known encoders; known are those of "
            f"{', '.join(encoders)}. Name another pipeline with the same encoders in cache.source"
        )
    return encoders[pipeline]
