"""A checkpoint of random values in the layout of the hub, for each identifier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.conformance.configs import small_config
from tests.conformance.registry import Unavailable, candidates, claims

from zerostart.upstream.transformers import without_weights

__all__ = ["choose", "randomise", "save"]

#: Largest model that counts as small.
MOST_PARAMETERS = 8_000_000


def choose(identifier: str) -> tuple[Any, Any]:
    """The model class and small configuration that stand for an identifier.

    Raises Unavailable with the reasons if no class of the identifier builds small and has its conversions.
    """
    reasons = []
    for kind in candidates(identifier):
        try:
            config = small_config(kind, identifier)
            with without_weights(torch.float32):
                model: Any = kind(config)
        except Exception as error:  # each architecture refuses in its own way
            reasons.append(f"{kind.__name__}: {type(error).__name__}: {' '.join(str(error).split())[:160]}")
            continue
        size = sum(p.numel() for p in model.parameters())
        if size > MOST_PARAMETERS:
            reasons.append(f"{kind.__name__} has {size} parameters at its smallest")
        elif identifier not in claims(model):
            reasons.append(f"{kind.__name__} takes its conversions from {sorted(claims(model))}")
        else:
            return kind, config
    raise Unavailable("; ".join(reasons))


def randomise(model: torch.nn.Module) -> None:
    """Random values in every parameter and every persistent buffer."""
    generator = torch.Generator().manual_seed(11)
    done: set[int] = set()
    for tensor in (*model.parameters(), *model.state_dict().values()):
        if tensor.data_ptr() in done or not tensor.numel():
            continue
        done.add(tensor.data_ptr())
        with torch.no_grad():
            if tensor.is_floating_point() or tensor.is_complex():
                values = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
                tensor.copy_(values)
            elif tensor.dtype == torch.bool:
                tensor.copy_(torch.rand(tensor.shape, generator=generator) < 0.5)
            else:
                tensor.copy_(torch.randint(0, 100, tensor.shape, generator=generator))


def save(
    kind: Any, config: Any, path: Path, dtype: torch.dtype, prepare: Callable[[Any], None] | None = None
) -> Any:
    """Build a random model, write it by ``save_pretrained`` and return it."""
    torch.manual_seed(3)
    model = kind._from_config(config, dtype=dtype)
    randomise(model)
    if prepare is not None:
        prepare(model)
    model.save_pretrained(path)
    return model
