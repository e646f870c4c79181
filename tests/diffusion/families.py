"""All small models of DiffSynth-Studio's own classes, by the pipelines' families."""

from tests.diffusion.family import Family
from tests.diffusion.frozen_families import FROZEN
from tests.diffusion.transformers_families import TRANSFORMERS

FAMILIES: dict[str, Family] = {**TRANSFORMERS, **FROZEN}
