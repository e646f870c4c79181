"""A checkpoint of random values in the hub's layout, for each identifier."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.conformance.configs import small_config
from tests.conformance.registry import Unavailable, candidates, claims
from tests.tiny import edit_tensors
from zerostart.upstream.transformers.models import without_weights

#: Maximum number of parameters of a small model.
MOST_PARAMETERS = 8_000_000


def choose(identifier: str) -> tuple[Any, Any]:
    """Return the model class and small configuration of an identifier.

    Raises Unavailable with the reasons if no class of the identifier builds small and has its conversions.
    """
    reasons = []
    for kind in candidates(identifier):
        try:
            config = small_config(kind, identifier)
            with without_weights(torch.float32):
                model: Any = kind(config)
        except Exception as error:  # each architecture fails in its own way
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
    """Fill every parameter and persistent buffer with random values."""
    generator = torch.Generator().manual_seed(11)
    finished: set[int] = set()
    for tensor in (*model.parameters(), *model.state_dict().values()):
        if tensor.data_ptr() in finished or not tensor.numel():
            continue
        finished.add(tensor.data_ptr())
        with torch.no_grad():
            if tensor.is_floating_point() or tensor.is_complex():
                values = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
                tensor.copy_(values)
            elif tensor.dtype == torch.bool:
                tensor.copy_(torch.rand(tensor.shape, generator=generator) < 0.5)
            else:
                tensor.copy_(torch.randint(0, 100, tensor.shape, generator=generator))


def save(
    kind: Any,
    config: Any,
    path: Path,
    dtype: torch.dtype,
    prepare: Callable[[Any], None] | None = None,
    shard_size: str = "300KB",
) -> Any:
    """Build a random model, write it by ``save_pretrained`` and return it."""
    torch.manual_seed(3)
    model = kind._from_config(config, dtype=dtype)
    randomise(model)
    if prepare is not None:
        prepare(model)
    model.save_pretrained(path, max_shard_size=shard_size)
    return model


def keep_prefixes(model: Any) -> None:
    """Let ``save_pretrained`` also revert changes of prefixes, which it skips for a new model."""
    model._weight_conversions = mapping_of(model)


def changes_prefixes(model: Any) -> bool:
    """Return True if the conversions of ``model`` change prefixes."""
    return any(type(entry).__name__ == "PrefixChange" for entry in mapping_of(model))


def mapping_of(model: Any) -> list[Any]:
    """Return the conversions of ``model`` without those for names of old releases."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    mapping: list[Any] = get_model_conversion_mapping(model, add_legacy=False)
    return mapping


def transpose_checked(model: Any, path: Path) -> int:
    """Transpose tensors that the hub stores transposed, which ``save_pretrained`` does not.

    They belong to a ``Transpose`` that decides by the shape.
    """
    checked = [
        entry
        for entry in mapping_of(model)
        for operation in getattr(entry, "operations", ())
        if getattr(operation, "check_dims", False)
    ]
    turned = 0

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        nonlocal turned
        for name, tensor in tensors.items():
            for entry in checked:
                if entry.rename_source_key(name)[1] is not None:
                    (operation,) = entry.operations
                    tensors[name] = tensor.transpose(operation.dim0, operation.dim1).contiguous()
                    turned += 1

    if checked:
        edit_tensors(path, edit)
    return turned
