"""Attention of a transformers model, by its class and configuration."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from zerostart.upstream.guard import Use, demand

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

TOUCHED = (
    Use(
        "transformers.modeling_utils:PreTrainedModel",
        "_is_stateful, _supports_attention_backend",
        "whether attention goes through the library's interface",
    ),
    Use(
        "transformers.configuration_utils:PreTrainedConfig",
        "_attn_implementation, get_text_config",
        "the attention implementation that a model was built with",
    ),
    Use(
        "transformers.masking_utils",
        "find_packed_sequence_indices(position_ids)",
        "which document of a packed sequence a token is of",
    ),
)
#: Types of layers in which only attention connects tokens.
_FULL, _SLIDING = "full_attention", "sliding_attention"


@functools.cache
def require_version() -> None:
    """Raise UnsupportedVersionError unless attention is as expected."""
    demand(TOUCHED, "Use sequence_parallel=1")


def implementation(model: PreTrainedModel) -> str:
    """Return the name of the attention implementation of a model."""
    require_version()
    return str(model.config.get_text_config()._attn_implementation)


def heads(model: PreTrainedModel) -> tuple[int, int]:
    """Return the number of query heads, and of key and value heads."""
    config: PreTrainedConfig = model.config.get_text_config()
    return config.num_attention_heads, config.num_key_value_heads


def kinds(model: PreTrainedModel) -> frozenset[str]:
    """Return the types of the layers, as in the configuration."""
    config: PreTrainedConfig = model.config.get_text_config()
    named = getattr(config, "layer_types", None)
    if named:
        return frozenset(named)
    return frozenset({_SLIDING if getattr(config, "sliding_window", None) else _FULL})


def obstacle(model: PreTrainedModel) -> str:
    """Return the reason against sequence parallelism, to follow "it has"; empty if none."""
    require_version()
    config: PreTrainedConfig = model.config.get_text_config()
    causal = [m.is_causal for m in model.modules() if isinstance(getattr(m, "is_causal", None), bool)]
    unsupported = sorted(kinds(model) - {_FULL, _SLIDING})
    # Sinks are one parameter for all heads, but a rank has a part of the heads.
    names = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    reasons = {
        "an encoder beside its decoder": bool(getattr(model.config, "is_encoder_decoder", False)),
        "layers that carry a state from token to token": bool(model._is_stateful),
        f"layers of type {', '.join(unsupported)}": bool(unsupported),
        "attention that does not go through transformers' interface": not model._supports_attention_backend,
        "attention that looks ahead": not causal or not all(causal),
        "latent attention, whose keys and values differ in size": hasattr(config, "kv_lora_rank"),
        "attention sinks, one for each head": "sinks" in names,
        "no num_key_value_heads in its configuration": not isinstance(
            getattr(config, "num_key_value_heads", None), int
        ),
    }
    return next((reason for reason, there in reasons.items() if there), "")


def packed_documents(positions: torch.Tensor) -> torch.Tensor | None:
    """Return the document number of each token, [rows, length]; None if a sequence is one document."""
    from transformers.masking_utils import find_packed_sequence_indices

    documents: torch.Tensor | None = find_packed_sequence_indices(positions)
    return documents
