"""What ``from_pretrained`` leaves on a transformers model besides its weights."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from zerostart.recipe import Recipes
from zerostart.upstream.transformers import keep_conversions

__all__ = ["finish_pretrained"]

logger = logging.getLogger("zerostart")


def finish_pretrained(
    model: Any, recipes: Recipes, source: str, root: str | None, dtype: torch.dtype | None
) -> None:
    """Set what later library calls look at.

    The conversions that matched (``save_pretrained`` reverses them), the name and dtype in the
    configuration, and the generation configuration that lies beside the weights.
    """
    keep_conversions(model, recipes.conversions)
    model.config.name_or_path = source
    if dtype is not None:
        model.config.dtype = dtype
    path = Path(root or "") / "generation_config.json"
    if root and path.is_file() and model.can_generate():
        from transformers import GenerationConfig

        try:
            model.generation_config = GenerationConfig.from_pretrained(root)
        except (OSError, ValueError, TypeError) as error:
            logger.warning("%s was not understood and is left out: %s", path, error)
