"""Private parts of transformers: how a model attends along its sequences, by its class and configuration."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from torch import nn

from zerostart.upstream.guard import Use, demand

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

_MODEL = "transformers.modeling_utils:PreTrainedModel"
TOUCHED = (
    Use(
        _MODEL,
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
#: Layers whose tokens see each other through attention alone.
_FULL, _SLIDING = "full_attention", "sliding_attention"


@functools.cache
def require() -> None:
    """Raise UnsupportedVersionError unless everything that this file uses is there."""
    demand(TOUCHED, "Use sequence_parallel=1")


def implementation(model: PreTrainedModel) -> str:
    """The name of the attention implementation of a model."""
    require()
    return str(model.config.get_text_config()._attn_implementation)


def heads(model: PreTrainedModel) -> tuple[int, int]:
    """Heads of queries, and of keys and values."""
    config: PreTrainedConfig = model.config.get_text_config()
    return config.num_attention_heads, config.num_key_value_heads


def kinds(model: PreTrainedModel) -> frozenset[str]:
    """The kinds of its layers, as the library's configurations name them."""
    config: PreTrainedConfig = model.config.get_text_config()
    named = getattr(config, "layer_types", None)
    if named:
        return frozenset(named)
    return frozenset({_SLIDING if getattr(config, "sliding_window", None) else _FULL})


def obstacle(model: PreTrainedModel) -> str:
    """Why no ranks can share the sequences of a model, after "it has", in words; empty if they can."""
    require()
    config: PreTrainedConfig = model.config.get_text_config()
    causal = [m.is_causal for m in _modules(model) if isinstance(getattr(m, "is_causal", None), bool)]
    others = sorted(kinds(model) - {_FULL, _SLIDING})
    # Sinks are one parameter for each head, which a rank with a part of the heads would have all of.
    names = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    reasons = {
        "an encoder beside its decoder": bool(getattr(model.config, "is_encoder_decoder", False)),
        "layers that carry a state from token to token": bool(model._is_stateful),
        f"layers of type {', '.join(others)}": bool(others),
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


def _modules(model: nn.Module) -> list[nn.Module]:
    return list(model.modules())
